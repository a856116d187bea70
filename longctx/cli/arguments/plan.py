"""Flags of `longctx plan`."""

import argparse
from pathlib import Path

from longctx.cli.arguments.engine import add_kv_dtype_argument

SUMMARY = "Search the parallel plan of a model on so many GPUs: what meets a target, and why others don't."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default="llama-3-8b",
        metavar="NAME|DIR",
        help="llama-3-8b, llama-3-70b, llama-3-405b-fp8 and others, or a folder with config.json; default: llama-3-8b",
    )
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help="at most")
    parser.add_argument("--host-gpus", type=int, default=8, metavar="N", help="of one host: --tensor's; default: 8")
    parser.add_argument(
        "--hardware",
        "--topology",
        dest="topology",
        default="h100-rdma",
        metavar="NAME|FILE",
        help="devices and links: h100-rdma (the default), h100-tcp, medha-a100 and others, or a JSON file",
    )
    add_kv_dtype_argument(parser)
    goal = parser.add_argument_group("target")
    goal.add_argument(
        "--context", required=True, metavar="N", help="tokens of the prompt: 131072, 128K or 10M (decimal)"
    )
    goal.add_argument("--output-tokens", type=int, default=256, metavar="N", help="of its answer; default: 256")
    goal.add_argument("--ttft", type=float, required=True, metavar="X", help="seconds to its first token, at most")
    goal.add_argument(
        "--tpot", type=float, required=True, metavar="X", help="seconds a token, of it and beside it, at most"
    )
    workload = parser.add_argument_group("workload, which the best plans serve in virtual time")
    workload.add_argument("--workload", type=Path, metavar="FILE", help="trace (JSON lines, or CSV of lengths)")
    workload.add_argument("--limit", type=int, metavar="N", help="only the first N requests of the file")
    workload.add_argument("--qps", type=float, dest="rate", metavar="R", help="requests a second, Poisson, on all GPUs")
    workload.add_argument("--seed", type=int, default=0, metavar="N", help="of arrivals; default: 0")
    workload.add_argument("--jobs", type=int, metavar="N", help="processes; default: as many as cores")
    results = parser.add_argument_group("results")
    results.add_argument("--best", type=int, default=10, metavar="N", help="plans to show; default: 10")
    results.add_argument("--price", type=float, metavar="X", help="of a GPU for an hour, for the cost of a prompt")
    results.add_argument("--no-check", action="store_true", help="don't simulate the winner")
    results.add_argument("--json", type=Path, metavar="FILE", help="all plans, and why others fall")
