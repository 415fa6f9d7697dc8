"""Builds deploy/kubernetes with `kubectl kustomize`, and finds contradictions to the gateway or between its parts."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from gateway.config.text import parse_duration, parse_size
from models.spec import LOAD_TIMEOUT
from tests.deploy.platforms import ROOT
from tests.docs.pages import skip_or_fail

FOLDER = ROOT / "deploy" / "kubernetes"
BUILDS = ("base", "overlays/gpu", "overlays/hpa", "overlays/keda")
UNLOADING, PROCESS = 5, 256 << 20
"""Seconds after a drain in which models are unloaded; memory of the process beside bodies and models."""
_SUFFIXES = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}


@cache
def _built(name: str) -> str:
    kubectl = shutil.which("kubectl")
    skip_or_fail([] if kubectl else ["kubectl"])
    assert kubectl is not None
    done = subprocess.run(
        [kubectl, "kustomize", str(FOLDER / name)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def built(name: str) -> list[Any]:
    """The manifests of the base or of an overlay, of which one may change what it likes."""
    return deepcopy(list(yaml.safe_load_all(_built(name))))


def only(documents: list[Any], kind: str) -> Any:
    (found,) = [document for document in documents if document["kind"] == kind]
    return found


def settings(documents: list[Any]) -> dict[str, Any]:
    """The configuration file of a build."""
    (text,) = only(documents, "ConfigMap")["data"].values()
    return tomllib.loads(text)


def size(text: str) -> int:
    """A quantity of memory, as Kubernetes writes it."""
    return int(text[:-2]) * _SUFFIXES[text[-2:]]


def contradictions(documents: list[Any]) -> list[str]:
    """The contradictions in a build whose manifests are each valid for their kind."""
    wrong: list[str] = []

    def must(true: bool, said: str) -> None:
        if not true:
            wrong.append(said)

    deployment, service = only(documents, "Deployment"), only(documents, "Service")
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    config = settings(documents)

    # the end: docs/howto/kubernetes.md, "Times"
    waits = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    drain = {name: parse_duration(str(config["drain"][name])) for name in ("delay", "timeout")}
    took = waits + drain["delay"] + drain["timeout"] + UNLOADING
    must(pod["terminationGracePeriodSeconds"] > took, f"SIGKILL comes before {took:.0f} s are over")

    # the start
    probe = container["startupProbe"]
    start = probe["periodSeconds"] * probe["failureThreshold"]
    slowest = max(parse_duration(str(model.get("load_timeout", LOAD_TIMEOUT))) for model in config["models"].values())
    must(start > slowest, f"a pod is started anew after {start} s, and a model may load {slowest:.0f} s")
    must(deployment["spec"]["progressDeadlineSeconds"] > start, "a rollout is given up while a pod may start")

    # probes and ports
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    must(ports["http"] == config["listen"]["port"], "the port http is not listen.port")
    must(ports["metrics"] == config["metrics"]["port"], "the port metrics is not metrics.port")
    asked = {"startupProbe": "ready", "readinessProbe": "ready", "livenessProbe": "live"}
    for name, path in asked.items():
        get = container[name]["httpGet"]
        must(get["path"] == f"/v2/health/{path}", f"{name} asks {get['path']}")
        must(get["port"] == "http", f"{name} asks the port {get['port']}")
    patience = container["livenessProbe"]["periodSeconds"] * container["livenessProbe"]["failureThreshold"]
    must(patience >= 30, f"a pod that is slow for {patience} s is killed")
    for port in service["spec"]["ports"]:
        must(port["targetPort"] in ports, f"the Service names the port {port['targetPort']}")
    protocols = {port["port"]: port["appProtocol"] for port in service["spec"]["ports"]}

    # All selectors match the pod's labels.
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    selectors = [deployment["spec"]["selector"]["matchLabels"], service["spec"]["selector"]]
    selectors += [only(documents, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"]]
    selectors += [only(documents, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"]]
    selectors += [spread["labelSelector"]["matchLabels"] for spread in pod["topologySpreadConstraints"]]
    selectors += [d["spec"]["selector"]["matchLabels"] for d in documents if d["kind"] == "PodMonitor"]
    must(all(selector.items() <= labels.items() and selector for selector in selectors), "a selector finds no pod")
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    must(mounts.keys() == volumes.keys(), "a volume is nowhere")
    (key,) = only(documents, "ConfigMap")["data"]
    must(f"--config={mounts['config']}/{key}" in container["args"], "the command reads another file")
    must(volumes["config"]["configMap"]["name"] == only(documents, "ConfigMap")["metadata"]["name"], "no such ConfigMap")

    # resources, and rights
    requests, limits = container["resources"]["requests"], container["resources"]["limits"]
    must(requests["memory"] == limits["memory"], "memory that is not there may be asked for")
    must("cpu" not in limits, "a limit of CPU")
    must(size(limits["memory"]) >= 2 * parse_size(config["limits"]["total_bytes"]) + PROCESS, "no memory for a model")
    rights = {**pod["securityContext"], **container["securityContext"]}
    must(rights["runAsNonRoot"] and rights["runAsUser"] == 1000, "it may be root")
    must(rights["readOnlyRootFilesystem"] and not rights["allowPrivilegeEscalation"], "it may write, or gain rights")
    must(
        rights["capabilities"] == {"drop": ["ALL"]} and rights["seccompProfile"] == {"type": "RuntimeDefault"}, "it may more"
    )
    must(pod["automountServiceAccountToken"] is False, "it has a token of the cluster")
    must(mounts.get("tmp") == "/tmp" and volumes["tmp"]["emptyDir"]["medium"] == "Memory", "/tmp is not in memory")
    must(deployment["spec"]["minReadySeconds"] >= 10, "a pod counts as there before it is in every load balancer")
    roll = deployment["spec"]["strategy"]["rollingUpdate"]
    must(roll["maxUnavailable"] == 0 or "nvidia.com/gpu" in limits, "a rollout takes a pod away before there is another")

    # Access to /metrics is limited.
    rules = only(documents, "NetworkPolicy")["spec"]["ingress"]
    open_to_all = [port["port"] for rule in rules if "from" not in rule for port in rule["ports"]]
    must(open_to_all == ["http"], f"everybody reaches {open_to_all}")

    for document in documents:
        match document["kind"]:
            case "PodMonitor":
                endpoints = document["spec"]["podMetricsEndpoints"]
                must([e["port"] for e in endpoints] == ["metrics"], "the monitor asks another port")
            case "HTTPRoute" | "GRPCRoute" as kind:
                wanted = "http" if kind == "HTTPRoute" else "kubernetes.io/h2c"
                for rule in document["spec"]["rules"]:
                    for backend in rule["backendRefs"]:
                        must(backend["name"] == service["metadata"]["name"], f"the {kind} names another Service")
                        must(protocols.get(backend["port"]) == wanted, f"the {kind} goes to a port that is not {wanted}")
                    if kind == "HTTPRoute":
                        must(set(rule["timeouts"].values()) == {"0s"}, "the HTTPRoute cuts streams")
            case "Ingress":
                wrong += _of_an_ingress(document, service)
            case "ScaledObject":
                spec = document["spec"]
                (trigger,) = [trigger["metadata"] for trigger in spec["triggers"]]
                behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
                least, target = spec["minReplicaCount"], trigger["threshold"]
                wrong += _of_an_autoscaler(spec, least, target, trigger["query"], behavior, deployment, config)
            case "HorizontalPodAutoscaler":
                spec = document["spec"]
                (metric,) = [metric["pods"] for metric in spec["metrics"]]
                (rule,) = adapter()["rules"]["custom"]
                must(metric["metric"]["name"] == rule["name"]["as"], f"nobody makes the metric {metric['metric']['name']}")
                least, target = spec["minReplicas"], metric["target"]["averageValue"]
                query = rule["seriesQuery"] + rule["metricsQuery"]
                wrong += _of_an_autoscaler(spec, least, target, query, spec["behavior"], deployment, config)
    return wrong


def _of_an_autoscaler(
    spec: Any, least: int, target: str, query: str, behavior: Any, deployment: Any, config: dict[str, Any]
) -> list[str]:
    capacity = sum(model["capacity"] for model in config["models"].values())
    documented = (ROOT / "docs/reference/observability.md").read_text(encoding="utf-8")
    named, down = re.findall(r"everywire_\w+", query), behavior["scaleDown"]
    checks = {
        "the Deployment and its autoscaler both say how many pods there are": "replicas" not in deployment["spec"],
        "it scales something else": spec["scaleTargetRef"]["name"] == deployment["metadata"]["name"],
        "one pod alone": least >= 2,
        f"the threshold is not 0.7 x {capacity}": abs(float(target) - 0.7 * capacity) < 0.05,
        f"not metrics: {named}": bool(named) and all(f"`{name}`" in documented for name in named),
        "pods go at once": down["stabilizationWindowSeconds"] == 300,
        "too fast": [(p["type"], p["value"], p["periodSeconds"]) for p in down["policies"]] == [("Pods", 1, 60)],
    }
    return [said for said, holds in checks.items() if not holds]


_NGINX = "nginx.ingress.kubernetes.io/"
_ANNOTATIONS = {
    "backend-protocol", "proxy-http-version", "proxy-buffering", "proxy-request-buffering", "proxy-body-size",
    "proxy-read-timeout", "proxy-send-timeout",
}  # fmt: skip
"""The annotations of ingress-nginx that a stream needs. It ignores a name that it does not know."""
_SILENCE = 3600
"""Seconds for which a stream may be silent."""


def _of_an_ingress(document: Any, service: Any) -> list[str]:
    name, spec = document["metadata"]["name"], document["spec"]
    said = {key.removeprefix(_NGINX): value for key, value in document["metadata"]["annotations"].items()}
    protocols = {port["name"]: port["appProtocol"] for port in service["spec"]["ports"]}
    wanted = {"HTTP": "http", "GRPC": "kubernetes.io/h2c"}.get(said["backend-protocol"])
    backends = [path["backend"]["service"] for rule in spec["rules"] for path in rule["http"]["paths"]]
    paths = {(path["path"], path["pathType"]) for rule in spec["rules"] for path in rule["http"]["paths"]}
    checks = {
        f"nginx knows no annotations {sorted(said.keys() - _ANNOTATIONS)}": said.keys() <= _ANNOTATIONS,
        f"the Ingress {name} names another Service": all(b["name"] == service["metadata"]["name"] for b in backends),
        f"the Ingress {name} goes to a port that is not {wanted}": all(
            protocols.get(backend["port"]["name"]) == wanted for backend in backends
        ),
        f"the Ingress {name} leaves paths out": paths == {("/", "Prefix")},
        f"the Ingress {name} has hosts without a certificate": {rule["host"] for rule in spec["rules"]}
        == {host for tls in spec["tls"] for host in tls["hosts"]},
        f"the Ingress {name} cuts streams": all(
            int(said.get(f"proxy-{way}-timeout", 60)) >= _SILENCE for way in ("read", "send")
        ),
        f"the Ingress {name} bounds uploads": said.get("proxy-body-size") == "0",
        f"the Ingress {name} gathers what streams": wanted != "http"
        or (said.get("proxy-buffering"), said.get("proxy-request-buffering")) == ("off", "off"),
        f"the Ingress {name} opens no WebSocket": wanted != "http" or said.get("proxy-http-version") == "1.1",
    }
    return [what for what, holds in checks.items() if not holds]


def adapter() -> Any:
    """The values for the chart of prometheus-adapter, which makes the autoscaler's metric."""
    return yaml.safe_load((FOLDER / "components/hpa/prometheus-adapter.yaml").read_text(encoding="utf-8"))


def schema(kind: str) -> Any:
    """The schema of an operator's kind, None where it is Kubernetes' own."""
    file = Path(__file__).parent / "schemas" / f"{kind}.json"
    return strict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else None


def strict(schema: Any) -> Any:
    """The schema with no property allowed that it does not name, as kubectl validates."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    named = schema.get("type") == "object" and "properties" in schema
    closed = named and not schema.get("x-kubernetes-preserve-unknown-fields")
    return {**{key: strict(value) for key, value in schema.items()}, **({"additionalProperties": False} if closed else {})}


def mistakes(document: Any) -> list[str]:
    """The errors of a manifest of an operator's kind, by the schema of its CRD."""
    its = schema(document["kind"])
    kind = its["x-kubernetes-group-version-kind"]
    assert document["apiVersion"] == f"{kind['group']}/{kind['version']}"
    return [error.message for error in jsonschema.Draft202012Validator(its).iter_errors(document)]
