"""Flags of what watches a server: metrics, logs, spans, events of the cache."""

import argparse

from longctx.cli.arguments.engine import flag

# Defaults of `ObserverSettings`, written again because importing it takes long (a test compares them).
OBSERVERS: list[tuple[str, str | None, str, str]] = [
    ("metrics_prefix", "longctx", "NAME", "of the metrics that vLLM has too: with vllm its dashboards work"),
    ("otlp", None, "URL", "where OpenTelemetry spans are sent, such as http://localhost:4318/v1/traces"),
    ("kv_events", None, "ENDPOINT", "where events of the cache, which show prompts, are: tcp://127.0.0.1:5557"),
    ("kv_events_replay", None, "ENDPOINT", "where missed ones can be asked for"),
    ("kv_events_topic", "", "TEXT", "their first frame"),
]


def add_observer_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("observers")
    for name, default, metavar, about in OBSERVERS:
        shown = f"; default: {default}" if default else ""
        group.add_argument(flag(name), default=default, metavar=metavar, help=about + shown)
    group.add_argument("--log-format", choices=["text", "json"], help="log a line for each request that has ended")
    group.add_argument("--log-prompts", action="store_true", help="with its prompt and answers")
