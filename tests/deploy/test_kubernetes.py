"""deploy/kubernetes: its builds are valid for three minors of Kubernetes, contradict nothing, and their command runs."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from gateway.config.load import resolve
from tests.deploy import read_only
from tests.deploy.kustomized import BUILDS, built, contradictions, mistakes, only, schema, settings
from tests.deploy.platforms import ROOT, Container, Image
from tests.deploy.test_manifests import sums
from tests.docs.pages import skip_or_fail
from tests.ports import free_port

pytestmark = pytest.mark.programs
MINORS = ("1.30", "1.33", "1.37")
PAGE = "docs/howto/kubernetes.md"
IMAGE = Image(ROOT / "deploy" / "Dockerfile")
Documents = list[Any]


def container(documents: Documents) -> Any:
    (made,) = only(documents, "Deployment")["spec"]["template"]["spec"]["containers"]
    return made


def validator() -> Any:
    try:
        return importlib.import_module("kubernetes_validate")
    except ImportError:
        skip_or_fail(["kubernetes-validate"])
        raise


def invalid(documents: Documents, minor: str) -> list[str]:
    """The fields that a cluster of that minor version would refuse."""
    kubernetes, wrong = validator(), []
    for document in documents:
        if schema(document["kind"]) is not None:
            wrong += mistakes(document)
            continue
        try:
            kubernetes.validate(document, minor, strict=True)
        except kubernetes.ValidationError as e:
            wrong.append(str(e.message))
    return wrong


@pytest.mark.parametrize("minor", MINORS)
@pytest.mark.parametrize("name", BUILDS)
def test_a_build_is_valid(name: str, minor: str) -> None:
    assert invalid(built(name), minor) == []


@pytest.mark.parametrize("name", BUILDS)
def test_a_build_contradicts_nothing(name: str) -> None:
    assert contradictions(built(name)) == []


def fields(documents: Documents) -> None:
    """A wrong field in each kind of the build for KEDA."""
    container(documents)["readinessProbes"] = {}
    only(documents, "Service")["spec"]["ports"][0]["port"] = "eighty"
    only(documents, "ScaledObject")["spec"]["minReplicas"] = 2
    only(documents, "HTTPRoute")["spec"]["rules"][0]["timeouts"]["request"] = "0"
    only(documents, "PodMonitor")["spec"]["podMetricsEndpoints"][0]["token"] = "x"


def test_a_wrong_field_is_found_in_each_kind() -> None:
    documents = built("overlays/keda")
    fields(documents)
    assert len(invalid(documents, MINORS[0])) == 5


@pytest.mark.parametrize("minor", MINORS)
def test_a_wrong_field_is_found_in_the_ingress_and_the_autoscaler(minor: str) -> None:
    documents = built("overlays/hpa")
    of(documents, "Ingress", "everywire")["spec"]["rules"][0]["http"]["paths"][0]["type"] = "Prefix"
    of(documents, "Ingress", "everywire-grpc")["spec"]["rules"][0]["http"]["paths"][0]["backend"]["serviceName"] = "x"
    only(documents, "HorizontalPodAutoscaler")["spec"]["minReplicaCount"] = 2
    assert len(invalid(documents, minor)) == 3


def test_an_operators_field_that_only_its_own_schema_knows_is_checked() -> None:
    documents = built("overlays/keda")
    route = only(documents, "HTTPRoute")["spec"]["rules"][0]
    route["matches"] = [{"path": {"type": "Prefix", "value": "/v2"}}]  # PathPrefix
    only(documents, "ScaledObject")["spec"]["fallback"]["behavior"] = "always"
    only(documents, "PodMonitor")["spec"]["podMetricsEndpoints"][0]["scheme"] = "http2"
    assert [wrong.partition(" is not one of")[0] for wrong in invalid(documents, MINORS[0])] == [
        "'Prefix'",
        "'always'",
        "'http2'",
    ]


def of(documents: Documents, kind: str, name: str) -> Any:
    """One of several of a kind."""
    (found,) = [d for d in documents if d["kind"] == kind and d["metadata"]["name"] == name]
    return found


def ingress(documents: Documents, name: str = "everywire") -> Any:
    return of(documents, "Ingress", name)


def annotations(documents: Documents, name: str = "everywire", **said: str) -> None:
    """Changes annotations of nginx's, named with underscores."""
    its = ingress(documents, name)["metadata"]["annotations"]
    its.update({f"nginx.ingress.kubernetes.io/{key.replace('_', '-')}": value for key, value in said.items()})


def autoscaler(documents: Documents) -> Any:
    return only(documents, "HorizontalPodAutoscaler")["spec"]


def pod(documents: Documents) -> Any:
    return only(documents, "Deployment")["spec"]["template"]["spec"]


FAULTS: dict[str, tuple[Callable[[Documents], object], str]] = {
    "a grace that is over before the drain": (
        lambda d: pod(d).update(terminationGracePeriodSeconds=45), "SIGKILL comes before 45 s are over",
    ),
    "a hook that waits too long": (
        lambda d: container(d)["lifecycle"]["preStop"]["sleep"].update(seconds=30), "SIGKILL comes before 65 s",
    ),
    "a start that is shorter than a load": (
        lambda d: container(d)["startupProbe"].update(failureThreshold=30), "a pod is started anew after 150 s",
    ),
    "liveness by the models": (
        lambda d: container(d)["livenessProbe"]["httpGet"].update(path="/v2/health/ready"), "livenessProbe asks",
    ),
    "a probe of another port": (
        lambda d: container(d)["readinessProbe"]["httpGet"].update(port="metrics"), "readinessProbe asks the port",
    ),
    "a limit of CPU": (lambda d: container(d)["resources"]["limits"].update(cpu="1"), "a limit of CPU"),
    "a root that is written to": (
        lambda d: container(d)["securityContext"].update(readOnlyRootFilesystem=False), "it may write",
    ),
    "metrics for everybody": (
        lambda d: only(d, "NetworkPolicy")["spec"]["ingress"][1].pop("from"), "everybody reaches",
    ),
    "gRPC by HTTP/1.1": (
        lambda d: only(d, "GRPCRoute")["spec"]["rules"][0]["backendRefs"][0].update(port=80), "the GRPCRoute goes to a port",
    ),
    "a stream that the route cuts": (
        lambda d: only(d, "HTTPRoute")["spec"]["rules"][0]["timeouts"].update(request="60s"), "the HTTPRoute cuts streams",
    ),
    "two who count pods": (lambda d: only(d, "Deployment")["spec"].update(replicas=2), "both say how many"),
    "a threshold of another capacity": (
        lambda d: only(d, "ScaledObject")["spec"]["triggers"][0]["metadata"].update(threshold="64"), "the threshold is not",
    ),
    "a metric that is none": (
        lambda d: only(d, "ScaledObject")["spec"]["triggers"][0]["metadata"].update(query="sum(everywire_sessions)"),
        "not metrics",
    ),
}  # fmt: skip


INGRESS_FAULTS: dict[str, tuple[Callable[[Documents], object], str]] = {
    "gRPC by the port of HTTP/1.1": (
        lambda d: ingress(d, "everywire-grpc")["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"].update(
            port={"name": "http"}
        ),
        "everywire-grpc goes to a port that is not kubernetes.io/h2c",
    ),
    "gRPC that nginx speaks as HTTP/1.1": (
        lambda d: annotations(d, "everywire-grpc", backend_protocol="HTTP"), "everywire-grpc goes to a port that is not http",
    ),
    "tokens that are gathered": (lambda d: annotations(d, proxy_buffering="on"), "everywire gathers what streams"),
    "uploads that are gathered": (lambda d: annotations(d, proxy_request_buffering="on"), "everywire gathers what streams"),
    "uploads of a megabyte at most": (lambda d: annotations(d, "everywire-grpc", proxy_body_size="1m"), "bounds uploads"),
    "streams of a minute": (lambda d: annotations(d, proxy_read_timeout="60"), "everywire cuts streams"),
    "streams of gRPC of a minute": (
        lambda d: annotations(d, "everywire-grpc", proxy_send_timeout="60"), "everywire-grpc cuts streams",
    ),
    "no WebSockets": (lambda d: annotations(d, proxy_http_version="1.0"), "opens no WebSocket"),
    "an annotation that is none": (lambda d: annotations(d, proxy_idle_timeout="1h"), "nginx knows no annotations"),
    "a host without a certificate": (lambda d: ingress(d)["spec"]["rules"][0].update(host="x.example.com"), "certificate"),
    "a path alone": (
        lambda d: ingress(d)["spec"]["rules"][0]["http"]["paths"][0].update(path="/v2"), "leaves paths out",
    ),
    "two who count pods": (lambda d: only(d, "Deployment")["spec"].update(replicas=2), "both say how many"),
    "a target of another capacity": (
        lambda d: autoscaler(d)["metrics"][0]["pods"]["target"].update(averageValue="64"), "the threshold is not",
    ),
    "a metric that nobody makes": (
        lambda d: autoscaler(d)["metrics"][0]["pods"]["metric"].update(name="sessions"), "nobody makes the metric sessions",
    ),
    "pods that go at once": (
        lambda d: autoscaler(d)["behavior"]["scaleDown"].update(stabilizationWindowSeconds=0), "pods go at once",
    ),
    "one pod": (lambda d: autoscaler(d).update(minReplicas=1), "one pod alone"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_contradiction_is_found(fault: str) -> None:
    documents = built("overlays/keda")
    plant, said = FAULTS[fault]
    plant(documents)
    assert [wrong for wrong in contradictions(documents) if said in wrong], contradictions(documents)


@pytest.mark.parametrize("fault", INGRESS_FAULTS)
def test_a_contradiction_of_the_ingress_or_the_autoscaler_is_found(fault: str) -> None:
    documents = built("overlays/hpa")
    plant, said = INGRESS_FAULTS[fault]
    plant(documents)
    assert [wrong for wrong in contradictions(documents) if said in wrong], contradictions(documents)


def test_the_page_has_the_times_of_the_manifests() -> None:
    documents = built("base")
    config, made = settings(documents), container(documents)
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([\w.]+)` \| ([^|]*) \|", page, re.MULTILINE))
    start, ready, live = (made[f"{name}Probe"] for name in ("startup", "readiness", "liveness"))
    seconds = start["periodSeconds"] * start["failureThreshold"]
    assert (
        rows.items()
        >= {
            "startupProbe": f"{start['periodSeconds']} s x {start['failureThreshold']} = {seconds} s",
            "readinessProbe": f"`{ready['httpGet']['path']}`, {ready['periodSeconds']} s",
            "livenessProbe": f"`{live['httpGet']['path']}`, {live['failureThreshold']} x {live['periodSeconds']} s",
            "preStop": f"`sleep` {made['lifecycle']['preStop']['sleep']['seconds']} s",
            "drain.delay": f"{config['drain']['delay']} s",
            "drain.timeout": config["drain"]["timeout"].replace("s", " s"),
            "terminationGracePeriodSeconds": f"{pod(documents)['terminationGracePeriodSeconds']} s",
            "minReadySeconds": f"{only(documents, 'Deployment')['spec']['minReadySeconds']} s",
            "limits.connection_age": config["limits"]["connection_age"].replace("min", " min"),
        }.items()
    )


@pytest.mark.parametrize("name", BUILDS)
def test_every_setting_of_the_file_is_one(name: str, tmp_path: Path) -> None:
    (text,) = only(built(name), "ConfigMap")["data"].values()
    file = tmp_path / "everywire.toml"
    file.write_text(text)
    resolve(file=file, environ={}, overrides={})


@pytest.fixture
def restricted(tmp_path: Path) -> Callable[..., list[str]]:
    """Makes the command that runs another one with the rights of the pod: only /tmp is writable, and it is not root."""
    if why := read_only.lacking():
        pytest.skip(f"not here: {why}")

    def within(**places: Path) -> list[str]:
        new = tmp_path / "root"
        new.mkdir()
        return read_only.read_only(new, "64m", {place.replace("_", "/"): path for place, path in places.items()})

    return within


def test_the_pods_command_serves_with_nothing_to_write_to_but_tmp(
    tmp_path: Path, restricted: Callable[..., list[str]]
) -> None:
    documents = built("base")
    assert (settings(documents)["listen"]["port"], IMAGE.one("USER")) == (8080, "1000:1000")
    config = tmp_path / "config"
    config.mkdir()
    ((name, text),) = only(documents, "ConfigMap")["data"].items()
    (config / name).write_text(text)
    port, metrics = free_port(), free_port()
    environ = {"EVERYWIRE_LISTEN__PORT": str(port), "EVERYWIRE_LISTEN__HOST": "127.0.0.1", "HOME": "/home/everywire"}
    environ |= {"EVERYWIRE_METRICS__PORT": str(metrics), "EVERYWIRE_METRICS__HOST": "127.0.0.1"}
    command = IMAGE.command(container(documents)["args"])
    with Container(command, tmp_path, environ, port=port, within=restricted(_etc_everywire=config)) as served:
        assert served.await_event("serving")["models"] == ["sums"]
        status = Path(f"/proc/{served.pid}/status").read_text()
        assert "\nUid:\t1000\t1000\t1000\t1000\n" in status
        assert "\nCapEff:\t0000000000000000\n" in status
        assert "\nNoNewPrivs:\t1\n" in status
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert served.ask("GET", container(documents)[probe]["httpGet"]["path"])[0] == 200
        assert sums(served) == {"OUTPUT0": [6, 9], "OUTPUT1": [4, 5]}
        scraped = ask_port(metrics, "/metrics")
        query = only(built("overlays/keda"), "ScaledObject")["spec"]["triggers"][0]["metadata"]["query"]
        assert [name for name in re.findall(r"everywire_\w+", query) if f'{name}{{model="sums"}}' not in scraped] == []
        served.terminate()
        assert served.await_event("drain report")["clean"]
        assert served.ended() == 0


def ask_port(port: int, path: str) -> str:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        assert answer.status == 200
        return answer.read().decode()
    finally:
        connection.close()


def test_there_nothing_can_be_written_but_tmp(tmp_path: Path, restricted: Callable[..., list[str]]) -> None:
    code = """
import os, json
def writes(path):
    try:
        open(path, "w").close()
    except OSError:
        return False
    return True
folders = {line.split()[1] for line in open("/proc/mounts")} | {"/", "/app", "/etc", "/usr", "/var/tmp", "/home"}
print(json.dumps(sorted(f for f in folders if os.path.isdir(f) and writes(f.rstrip("/") + "/x") and not f.startswith("/dev"))))
"""
    config = tmp_path / "config"
    config.mkdir(mode=0o777)
    command = ["python", "-c", code]
    with Container(command, tmp_path, {}, port=0, within=restricted(_etc_everywire=config)) as said:
        with pytest.raises(AssertionError) as told:
            said.await_event("nothing")
        assert said.ended() == 0
    assert json.loads(str(told.value).splitlines()[-1]) == ["/tmp"]
