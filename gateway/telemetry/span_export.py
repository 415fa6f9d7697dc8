"""Exports the standalone server's spans: makes a provider for the process from the configuration and OTEL_* variables."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from gateway.config import TracingConfig
from gateway.config.problem import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

log = logging.getLogger("gateway")

INSTALL = "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
"""The command for what `tracing.enabled` needs, wherever everywire was installed from."""
# OpenTelemetry's protocols and the names that Python packages give their exporters. The extra installs the one for HTTP.
_OTLP = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}
_PACKAGES = {"otlp_proto_http": INSTALL, "otlp_proto_grpc": "pip install opentelemetry-exporter-otlp-proto-grpc"}


@contextmanager
def exporting(config: TracingConfig) -> Iterator[None]:
    """Makes a provider that exports, and sets it as the process's global one, so that models' spans are exported too. At the
    end of the block the remaining spans are sent, within `flush_timeout` seconds. If the process has a provider already,
    as under `opentelemetry-instrument`, this does nothing. ConfigError if a package is missing."""
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as e:
        raise ConfigError(f"tracing.enabled is true and {e.name} is not installed: {INSTALL}") from e
    if not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        yield
        return
    named = SERVICE_NAME in OTELResourceDetector().detect().attributes
    resource = Resource.create({} if named else {SERVICE_NAME: config.service_name})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    for name in _exporters(config):
        provider.add_span_processor(BatchSpanProcessor(_load(name)()))
    trace.set_tracer_provider(provider)
    try:
        yield
    finally:
        # a collector that does not answer must not keep the process from ending
        last = threading.Thread(target=provider.shutdown, name="last spans", daemon=True)
        last.start()
        last.join(config.flush_timeout)
        if last.is_alive():
            log.warning(
                "the last spans were not sent in time",
                extra={"seconds": config.flush_timeout, "setting": "tracing.flush_timeout"},
            )


def _exporters(config: TracingConfig) -> list[str]:
    """Returns the exporters, by the names that packages give them."""
    said = os.environ.get("OTEL_TRACES_EXPORTER", "").strip() or config.exporter
    names = [name.strip() for name in said.split(",")]
    return [_otlp() if name == "otlp" else name for name in names if name != "none"]


def _otlp() -> str:
    for variable in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if said := os.environ.get(variable, "").strip():
            if said not in _OTLP:
                raise ConfigError(f"{variable} must be one of {', '.join(_OTLP)}, not {said[:100]!r}")
            return _OTLP[said]
    return _OTLP["http/protobuf"]


def _load(name: str) -> Callable[[], SpanExporter]:
    for found in entry_points(group="opentelemetry_traces_exporter", name=name):
        made: Callable[[], SpanExporter] = found.load()
        return made
    install = _PACKAGES.get(name)
    hint = f": {install}" if install else ", which OTEL_TRACES_EXPORTER names: install the package that has it"
    raise ConfigError(f"tracing.enabled is true and no installed package has the span exporter {name[:100]!r}{hint}")
