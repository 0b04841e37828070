"""How the server is: health, version, models, and metrics in Prometheus's format. Counts nothing itself but time.

Names are vLLM's under the prefix `specdec:`, so boards and benchmarks made for it need only the prefix changed. Nothing
that a client sends becomes a label.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

import specdec
from specdec.errors import SpecdecError
from specdec.metrics import Metrics
from specdec.server.errors import Draining, EngineDead, answer
from specdec.server.service import Service

FIRST_TOKEN_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
REQUEST_BUCKETS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)


class Telemetry:
    """The registry of one server: the engine's counters, read when asked for, and times, told by the bridge."""

    def __init__(self, metrics: Metrics, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(metrics, model_name))
        self._first_token = self._histogram(
            "time_to_first_token_seconds",
            "From arrival to the first token of a choice.",
            FIRST_TOKEN_BUCKETS,
            model_name,
        )
        self._token = self._histogram(
            "inter_token_latency_seconds", "Between one token of a choice and the next.", TOKEN_BUCKETS, model_name
        )
        self._request = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the end of a choice.", REQUEST_BUCKETS, model_name
        )

    def first_token(self, seconds: float) -> None:
        """From arrival to the first token of a choice."""
        self._first_token.observe(seconds)

    def tokens(self, seconds: float, count: int) -> None:
        """Between emissions of a choice; the `count` tokens of one emission share the time evenly."""
        for _ in range(count):
            self._token.observe(seconds / count)

    def finished(self, seconds: float) -> None:
        """From arrival to the end of a choice."""
        self._request.observe(seconds)

    def _histogram(self, name: str, meaning: str, buckets: tuple[float, ...], model_name: str) -> Histogram:
        histogram = Histogram(
            f"specdec:{name}", meaning, labelnames=("model_name",), buckets=buckets, registry=self.registry
        )
        return histogram.labels(model_name)


class EngineCollector(Collector):
    """The engine's plain numbers as Prometheus's families. (prometheus_client knows collectors by this class.)"""

    def __init__(self, metrics: Metrics, model_name: str) -> None:
        self._metrics = metrics
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        """One family a number."""
        metrics, acceptance = self._metrics, self._metrics.acceptance
        gauges = (
            ("num_requests_running", "Sequences in the running batch.", metrics.running),
            ("num_requests_waiting", "Sequences that wait to run.", metrics.waiting),
            ("kv_cache_usage_perc", "Share of KV blocks in use; 1 is all.", metrics.kv_usage),
        )
        counters = (
            ("num_preemptions", "Sequences sent back to the queue for lack of blocks.", metrics.preemptions),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", metrics.prompt_tokens),
            ("prefix_cache_hits", "Prompt tokens found there.", metrics.cached_prompt_tokens),
            ("prompt_tokens", "Prompt tokens.", metrics.prompt_tokens),
            ("prompt_tokens_cached", "Prompt tokens that needed no computing.", metrics.cached_prompt_tokens),
            ("generation_tokens", "Tokens emitted.", metrics.generation_tokens),
            ("engine_steps", "Forwards of the target.", metrics.steps),
            ("spec_decode_num_drafts", "Draws with at least one draft.", acceptance.drafts),
            ("spec_decode_num_draft_tokens", "Drafted tokens verified.", acceptance.draft_tokens),
            ("spec_decode_num_accepted_tokens", "Drafted tokens emitted.", acceptance.accepted_tokens),
            ("drafter_errors", "Drafts lost because the drafter failed.", metrics.drafter_errors),
            ("grammar_errors", "Sequences ended by their grammar's backend.", metrics.constraint_errors),
            ("grammar_dead_end", "Sequences ended where the grammar allowed nothing.", metrics.dead_ends),
            ("corrupted_requests", "Sequences ended by logits that are not numbers.", metrics.numerical_errors),
        )
        for name, meaning, value in gauges:
            yield self._add(GaugeMetricFamily(f"specdec:{name}", meaning, labels=("model_name",)), (), value)
        for name, meaning, value in counters:
            yield self._add(CounterMetricFamily(f"specdec:{name}", meaning, labels=("model_name",)), (), value)
        depths = CounterMetricFamily(
            "specdec:spec_decode_num_accepted_tokens_per_pos",
            "Draws that emitted a drafted token at this depth.",
            labels=("model_name", "position"),
        )
        for depth, value in enumerate(list(acceptance.accepted_per_depth)):
            self._add(depths, (str(depth),), value)
        yield depths
        for name, meaning in (
            ("draft_tokens", "Drafted tokens verified, by drafter."),
            ("accepted_tokens", "Drafted tokens emitted, by drafter."),
        ):
            family = CounterMetricFamily(
                f"specdec:spec_decode_num_{name}_by_source", meaning, labels=("model_name", "source")
            )
            for source, count in dict(acceptance.by_source).items():
                self._add(family, (source,), getattr(count, name))
            yield family
        finished = CounterMetricFamily(
            "specdec:request_success", "Sequences finished, by reason.", labels=("model_name", "finished_reason")
        )
        for reason, value in list(metrics.finished.items()):
            self._add(finished, (reason,), value)
        yield finished

    def _add(
        self, family: GaugeMetricFamily | CounterMetricFamily, labels: tuple[str, ...], value: float
    ) -> GaugeMetricFamily | CounterMetricFamily:
        family.add_metric((self._model_name, *labels), value)
        return family


async def health(http: HttpRequest) -> Response:
    """200 while requests are taken, 503 while draining and once the engine is dead."""
    service: Service = http.app.state.service
    try:
        service.bridge.check_admission()
    except (Draining, EngineDead) as error:
        return refusal(error)
    return JSONResponse({"status": "ok"})


async def version(http: HttpRequest) -> Response:
    """The version of this server."""
    return JSONResponse({"version": specdec.__version__})


async def metrics(http: HttpRequest) -> Response:
    """Prometheus's text format."""
    telemetry: Telemetry = http.app.state.telemetry
    return Response(generate_latest(telemetry.registry), headers={"content-type": CONTENT_TYPE_LATEST})


async def models(http: HttpRequest) -> Response:
    """All names of the served model."""
    service: Service = http.app.state.service
    return JSONResponse({"object": "list", "data": [_card(service, name) for name in service.names]})


async def model(http: HttpRequest) -> Response:
    """One of them. 404 for a name that is not served."""
    service: Service = http.app.state.service
    name = http.path_params["name"]
    service.check_model(name)
    return JSONResponse(_card(service, name))


def refusal(error: SpecdecError | Exception) -> Response:
    """An error as a response."""
    told = answer(error)
    return Response(told.body, told.status, told.headers, media_type="application/json")


def _card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "specdec",
        "root": service.names[0],
        "parent": None,
        "max_model_len": service.loaded.max_model_len,
    }
