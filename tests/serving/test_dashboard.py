"""The Grafana dashboard: every query is PromQL, of metrics and labels that a server exports."""

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml
from fake_device import MODEL
from letter_tokenizer import LetterTokenizer
from prometheus_client.parser import text_string_to_metric_families
from tiered_fake import make_tiered_engine

from longctx.cluster.conductor.config import ConductorConfig
from longctx.cluster.conductor.instance import InstanceSpec
from longctx.cluster.router.instances import Instance
from longctx.cluster.router.server import RouterServer
from longctx.cluster.transfer.stats import TransferStats
from longctx.serving import EngineConfig, Request, SamplingParams
from longctx.serving.engine.thread import EngineThread
from longctx.serving.kv_cache.tiers.config import TierConfig
from longctx.serving.server.access import HttpRequests
from longctx.serving.server.caches import EngineCaches
from longctx.serving.server.metrics import ServerMetrics
from longctx.serving.server.responses_store import ResponseStore

DASHBOARD = json.loads((Path(__file__).parents[2] / "examples/grafana/longctx.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"].replace("$__rate_interval", "1m") for panel in PANELS for target in panel["targets"]]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The labels of every series that a server exports."""
    disk = tmp_path_factory.mktemp("pages")
    thread = EngineThread(make_tiered_engine(tiers=TierConfig(2**16, 2**16, str(disk))))
    metrics = ServerMetrics("longctx", thread, "m")
    metrics.transfers = {"sent": TransferStats(), "received": TransferStats()}
    metrics.caches = EngineCaches(thread, "m", None, 1.0)
    thread.engine.generate(Request([1, 2, 3], SamplingParams(max_tokens=3)))
    metrics.responses = ResponseStore()
    requests = HttpRequests()
    requests.note("GET", "/health", "/health", 200, 0.01, "", None)
    metrics.more = requests.collect
    return labels_of(metrics.render(max_age=0))


@pytest.fixture(scope="module")
def exported_by_routers() -> dict[str, set[str]]:
    """The labels of every series that a router exports which has an instance and has seen all that can happen."""
    config = EngineConfig(page_size=4, hash_key=bytes(16))
    router = RouterServer(MODEL.config, LetterTokenizer(), config, ("m",), ConductorConfig())
    router.conductor.join(InstanceSpec("one", "both", FixedCosts(), 4, 100, 2, 1.0), 0.0)
    instance = Instance("one", None, "both")  # type: ignore[arg-type]
    router.instances.by_name["one"] = instance
    stats = router.cluster.stats
    stats.assignments["one", "one"] = stats.transfers["one", "one"] = 1
    stats.rejections["ttft", "prefill"] = stats.failures["one", "broken"] = stats.refusals["ttft"] = 1
    found = labels_of(router.metrics.render(max_age=0))
    router.close()
    return found


class FixedCosts:
    """Of an instance whose work takes no time."""

    def prefill_seconds(self, cached: int, prompt: int) -> float:
        return 0.0

    def decode_seconds(self, batch: int, tokens: int) -> float:
        return 0.0

    def inline_seconds(self, batch: int, tokens: int, cached: int, prompt: int) -> float:
        return 0.0

    def transfer_bytes(self, tokens: int) -> float:
        return 0.0


def labels_of(text: bytes) -> dict[str, set[str]]:
    """The labels of every series in Prometheus's text form."""
    series = defaultdict[str, set[str]](set)
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            series[sample.name] |= set(sample.labels)
    return series


def selectors(expression: Any) -> Iterator[Any]:
    """The vector selectors of an expression."""
    match expression:
        case promql.VectorSelector():
            yield expression
        case promql.MatrixSelector():
            yield expression.vector_selector
        case promql.NumberLiteral():
            pass
        case promql.Call():
            for argument in expression.args:
                yield from selectors(argument)
        case promql.BinaryExpr():
            yield from selectors(expression.lhs)
            yield from selectors(expression.rhs)
        case promql.AggregateExpr() | promql.ParenExpr():
            yield from selectors(expression.expr)
        case _:
            raise AssertionError(f"no rule for {type(expression)}")


def groupings(expression: Any) -> Iterator[tuple[set[str], Any]]:
    """The labels that each aggregation keeps, and what it aggregates."""
    if isinstance(expression, promql.AggregateExpr):
        yield set(expression.modifier.labels if expression.modifier else ()), expression.expr
    for part in ("args", "lhs", "rhs", "expr"):
        found = getattr(expression, part, [])
        for each in found if isinstance(found, list) else [found]:
            yield from groupings(each)


@pytest.mark.parametrize("query", QUERIES)
def test_every_query_names_series_and_labels_that_exist(query: str, exported: dict[str, set[str]]) -> None:
    expression = promql.parse(query)
    found = list(selectors(expression))
    assert found
    for selector in found:
        assert selector.name in exported
        assert {matcher.name for matcher in selector.matchers.matchers} <= exported[selector.name]
    for labels, inner in groupings(expression):
        for selector in selectors(inner):
            assert labels - {"instance"} <= exported[selector.name]  # Prometheus adds that one


def test_alerts_name_series_and_labels_that_exist(
    exported: dict[str, set[str]], exported_by_routers: dict[str, set[str]]
) -> None:
    [group] = yaml.safe_load((Path(__file__).parents[2] / "examples/grafana/alerts.yaml").read_text())["groups"]
    known = exported | exported_by_routers
    for rule in group["rules"]:
        expression = promql.parse(rule["expr"])
        found = list(selectors(expression))
        assert found
        for selector in found:
            assert selector.name in known
            assert {matcher.name for matcher in selector.matchers.matchers} <= known[selector.name]
        for labels, inner in groupings(expression):
            for selector in selectors(inner):
                assert labels - {"instance"} <= known[selector.name]
        kept = {label for labels, _ in groupings(expression) for label in labels} or {"instance"}
        assert set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])) <= kept
    assert len({rule["alert"] for rule in group["rules"]}) == len(group["rules"]) > 9


def test_panels_show_what_the_server_exports(exported: dict[str, set[str]]) -> None:
    shown = {selector.name for query in QUERIES for selector in selectors(promql.parse(query))}
    own = {"chunk_rows", "admission_slack_ratio", "step_seconds_over_predicted", "rank_idle_seconds", "pages_held"}
    for name in (*own, "time_to_first_token_seconds", "inter_token_latency_seconds"):
        assert any(series.startswith(f"longctx:{name}") for series in shown)


def test_the_page_on_metrics_has_all_of_them(
    exported: dict[str, set[str]], exported_by_routers: dict[str, set[str]]
) -> None:
    page = (Path(__file__).parents[2] / "docs/metrics.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if re.search(r"\| (gauge|counter|histogram) \|", line)]
    told = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    names = {
        series.removeprefix("longctx:") for series in (*exported, *exported_by_routers) if series.startswith("longctx:")
    }
    histograms = {name.removesuffix("_bucket") for name in names if name.endswith("_bucket")}
    plain = {name for name in names if not re.fullmatch(r"(.*)_(bucket|sum|count)", name)}
    assert len(told) == len(set(told))
    assert set(told) == plain | histograms
