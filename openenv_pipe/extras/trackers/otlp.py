"""Episodes as OpenTelemetry traces, sent by OTLP over HTTP: to Langfuse, Weave, Phoenix, MLflow."""

import asyncio
import base64
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from openenv_pipe.config.schema.base import check_header_value
from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.trackers.episode_trace import (
    SCRIPTED,
    Attributes,
    Origin,
    Span,
    episode_spans,
    provider_and_model,
    scores_of,
    trace_id,
)
from openenv_pipe.extras.trackers.schema import OtlpTrackerConfig
from openenv_pipe.runs.evals import BASELINE
from openenv_pipe.runs.record import EndStatus
from openenv_pipe.system.http import Access, HttpClient
from openenv_pipe.system.optional_packages import needed_by
from openenv_pipe.trackers.base import Opened, TrackedEvaluation, TrackedRun, TrackedStep
from openenv_pipe.types import Episode, Group

TRACES = "/api/public/otel/v1/traces"  # the end of the endpoint that takes traces
INGESTION = "/api/public/ingestion"
SCORES_PER_REQUEST = 200
MAX_ANSWER_BYTES = 2**20
MULTI_STATUS = 207  # some may have been taken, and some rejected
MAX_SHOWN = 200  # characters of a rejection
SPANS_PER_REQUEST = 256
NAME = "openenv-pipe"


def server_of(endpoint: str) -> str | None:
    """Return the address of the Langfuse server that has this endpoint; None for other tools."""
    return endpoint.removesuffix(TRACES) if endpoint.endswith(TRACES) else None


async def _send_scores(
    server: str,
    headers: Mapping[str, str],
    episodes: Sequence[tuple[int, Episode]],
    *,
    timeout_s: float,
) -> None:
    """Send rewards as scores to Langfuse, which does not take them from OpenTelemetry's events.

    They go to its ingestion API (https://langfuse.com/docs/api), after the traces that they belong
    to. A score that is sent again has the same id, and replaces the earlier one.

    episodes: each with the id of its trace.

    Raises ConnectionError if the server has not taken all of them, and HttpError without an answer.
    """
    events = [event for trace, episode in episodes for event in _events(trace, episode)]
    async with HttpClient(server, Access(headers=headers)) as client:
        for start in range(0, len(events), SCORES_PER_REQUEST):
            answer = await client.request(
                "POST",
                INGESTION,
                timeout_s=timeout_s,
                body={"batch": events[start : start + SCORES_PER_REQUEST]},
                max_bytes=MAX_ANSWER_BYTES,
            )
            problem = _problem(answer.status, answer.content)
            if problem is not None:
                raise ConnectionError(f"{server}{INGESTION} did not accept scores: {problem}")


def _problem(status: int, content: bytes) -> str | None:
    """Say what the server has rejected; None if it has taken everything."""
    if status != MULTI_STATUS:
        return None if status in (200, 201) else f"HTTP status {status}"
    try:
        errors = json.loads(content)["errors"]
    except (ValueError, LookupError, TypeError):
        return "its answer is not the one of the ingestion API"
    return f"{errors!r:.{MAX_SHOWN}}" if errors else None


def _events(trace: int, episode: Episode) -> list[dict[str, Any]]:
    told = datetime.now(UTC).isoformat()
    events = []
    for name, value, comment in scores_of(episode):
        known = f"{trace:032x}-{name}"
        body = {
            "id": known,
            "traceId": f"{trace:032x}",
            "name": name,
            "value": value,
            "dataType": "NUMERIC",
            "comment": comment,
        }
        # Langfuse keeps the first of two events with one id, so a repeated event gets a new id.
        events.append(
            {"id": f"{known}-{told}", "type": "score-create", "timestamp": told, "body": body}
        )
    return events


class OtlpTracker:
    """One trace for each episode that is sampled. It sends no metrics and knows no runs."""

    def __init__(self, key: str, config: OtlpTrackerConfig, folder: Path) -> None:
        package = "opentelemetry-exporter-otlp-proto-http"
        with needed_by("tracker.type=otlp", package, ", or set tracker=none"):
            import opentelemetry.exporter.otlp.proto.http.trace_exporter
            import opentelemetry.sdk.trace  # noqa: F401
        self._config = config
        self._headers = {**config.headers, **_credentials(key, config)}
        self._run: TrackedRun | None = None
        self._exporter: Any = None
        self._resource: Any = None

    def open(self, run: TrackedRun) -> Opened:
        from opentelemetry.exporter.otlp.proto.http import Compression
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource

        self._run = run
        self._resource = Resource({"service.name": NAME})
        self._exporter = OTLPSpanExporter(
            endpoint=self._config.endpoint,
            headers=self._headers,
            timeout=self._config.timeout_s,
            compression=Compression.Gzip,
        )
        return Opened(run_id=run.id)

    def log(self, step: TrackedStep) -> None:
        self._send(self._origin(step.record["step"]), step.groups)

    def log_evaluation(self, evaluation: TrackedEvaluation) -> None:
        """Send the sampled episodes of an evaluation, as if they were those of a step."""
        report = evaluation.report
        origin = replace(self._origin(report.step), evaluation=report.label, model=report.model)
        if report.label.startswith(BASELINE):
            origin = replace(origin, provider=SCRIPTED)
        self._send(origin, evaluation.groups)

    def close(self, status: EndStatus, summary: Mapping[str, float]) -> None:
        self._exporter.shutdown()

    def _origin(self, step: int | None) -> Origin:
        assert self._run is not None
        provider, model = provider_and_model(self._run.config)
        return Origin(
            run=self._run.id,
            environment=self._run.config["env"]["name"],
            provider=provider,
            model=model,
            step=step,
            now_s=time.time(),
        )

    def _send(self, origin: Origin, groups: Sequence[Group]) -> None:
        """Send the sampled episodes, and to Langfuse their rewards as scores."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        sampled = self._sampled(origin, groups)
        spans = [
            self._readable(trace, span)
            for trace, group, episode in sampled
            for span in episode_spans(origin, group, episode)
        ]
        for start in range(0, len(spans), SPANS_PER_REQUEST):
            part = spans[start : start + SPANS_PER_REQUEST]
            if self._exporter.export(part) is not SpanExportResult.SUCCESS:
                raise ConnectionError(f"{self._config.endpoint} did not accept {len(part)} spans")
        if sampled and (server := server_of(self._config.endpoint)) is not None:
            episodes = [(trace, episode) for trace, _, episode in sampled]
            limit_s = self._config.timeout_s
            asyncio.run(_send_scores(server, self._headers, episodes, timeout_s=limit_s))

    def _sampled(self, origin: Origin, groups: Sequence[Group]) -> list[tuple[int, str, Episode]]:
        """Choose episodes by their traces' ids, which are hashes, so that none is preferred."""
        found = [
            (trace_id(origin, group.id, episode), group.id, episode)
            for group in groups
            for episode in group.episodes
        ]
        threshold = self._config.sample_rate * 2**128
        chosen = sorted((each for each in found if each[0] < threshold), key=lambda each: each[0])
        return chosen[: self._config.max_per_step]

    def _readable(self, trace: int, span: Span) -> Any:
        from opentelemetry.sdk.trace import Event, ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

        def context(span_id: int) -> SpanContext:
            sampled = TraceFlags(TraceFlags.SAMPLED)
            return SpanContext(trace, span_id, is_remote=False, trace_flags=sampled)

        def event(name: str, attributes: Attributes) -> Event:
            return Event(name, attributes, timestamp=span.end_ns)

        return ReadableSpan(
            name=span.name,
            context=context(span.id),
            parent=None if span.parent is None else context(span.parent),
            resource=self._resource,
            attributes=span.attributes,
            events=[event(*each) for each in span.events],
            kind=SpanKind.CLIENT if span.is_call else SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=InstrumentationScope(NAME),
        )


def _credentials(key: str, config: OtlpTrackerConfig) -> dict[str, str]:
    """Return the header with the credentials, which are read from the environment.

    Raises ConfigError: a variable is not set, or has a character that no header can have.
    """
    credentials = config.credentials
    if credentials is None:
        return {}
    missing = [each for each in credentials.variables if not os.environ.get(each)]
    if missing:
        raise ConfigError(
            f"{key}: the environment variable {' and '.join(missing)} is not set; the header "
            f"{credentials.header} is made from it"
        )
    values = [os.environ[each] for each in credentials.variables]
    value = values[0]
    if credentials.scheme == "bearer":
        value = f"Bearer {value}"
    elif credentials.scheme == "basic":
        value = f"Basic {base64.b64encode(':'.join(values).encode()).decode()}"
    try:
        return {credentials.header: check_header_value(value)}
    except ValueError as error:
        raise ConfigError(f"{key}.credentials: {error}") from error
