"""The manifests for KServe: right by the schemas of its CRDs, their times right by one another, their command run."""

import json
import re
import socket
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from models.spec import LOAD_TIMEOUT
from tests.deploy.kustomized import mistakes
from tests.deploy.platforms import ROOT, Container, Image, in_force
from tests.docs.pages import blocks
from tests.ports import free_port

DEPLOY, PAGE = ROOT / "deploy", "docs/howto/deploy.md"
MANIFESTS = ("serving-runtime", "inference-service")
NAME = "sums"
TENSOR = {"datatype": "INT64", "shape": [2]}
REQUEST = {"inputs": [{"name": "INPUT0", "data": [5, 7], **TENSOR}, {"name": "INPUT1", "data": [1, 2], **TENSOR}]}


@cache
def _manifest(name: str) -> Any:
    return yaml.safe_load((DEPLOY / "kserve" / f"{name}.yaml").read_text(encoding="utf-8"))


def manifest(name: str) -> Any:
    return deepcopy(_manifest(name))


def container() -> Any:
    """The container of a pod, as KServe makes it of both manifests, the placeholder filled in."""
    (made,) = manifest("serving-runtime")["spec"]["containers"]
    model = manifest("inference-service")["spec"]["predictor"]["model"]
    made["args"] += model.get("args", [])
    metadata = manifest("inference-service")["metadata"]
    return json.loads(json.dumps(made).replace("{{.Name}}", metadata["name"]))


def environ() -> dict[str, str]:
    """The variables of the pod."""
    return {variable["name"]: variable["value"] for variable in container()["env"]}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_is_one_of_its_kind(name: str) -> None:
    assert mistakes(manifest(name)) == []


def test_what_is_wrong_would_be_seen() -> None:
    runtime = manifest("serving-runtime")
    del runtime["spec"]["containers"][0]["name"]
    runtime["spec"]["multiModel"] = "no"
    runtime["spec"]["containers"][0]["readinessProbes"] = {}
    assert len(mistakes(runtime)) == 3


def test_what_is_wrong_with_the_service_would_be_seen() -> None:
    service = manifest("inference-service")
    predictor = service["spec"]["predictor"]
    predictor["minReplica"] = 1
    predictor["timeout"] = "1h"
    predictor["model"]["storageURI"] = predictor["model"].pop("storageUri")
    predictor["scaleMetric"] = "sessions"
    assert len(mistakes(service)) == 4


def test_the_service_has_a_pod_to_spare_and_time_for_streams() -> None:
    predictor = manifest("inference-service")["spec"]["predictor"]
    assert 2 <= predictor["minReplicas"] <= predictor["maxReplicas"]
    assert predictor["timeout"] >= 3600
    assert "scaleMetric" not in predictor  # concurrency is Knative's, and this one is not


def test_the_service_finds_its_runtime() -> None:
    runtime, service = map(manifest, MANIFESTS)
    model = service["spec"]["predictor"]["model"]
    assert model["runtime"] == runtime["metadata"]["name"]
    assert model["modelFormat"]["name"] in [found["name"] for found in runtime["spec"]["supportedModelFormats"]]
    assert model["protocolVersion"] in runtime["spec"]["protocolVersions"]
    assert not runtime["spec"]["multiModel"]
    assert container()["name"] == "kserve-container"  # it is this one that KServe gives the model to


def times() -> dict[str, float]:
    """Seconds from the pod's deletion on: each begins where the one before is over, and all of them within the grace."""
    drain = in_force(command(on="/opt/ml/model"), environ())["drain"]
    waits = container()["lifecycle"]["preStop"]["sleep"]["seconds"]
    return {
        "preStop": float(waits),
        "drain.delay": float(str(drain["delay"]).removesuffix("s")),
        "drain.timeout": float(str(drain["timeout"]).removesuffix("s")),
    }


def grace() -> int:
    return int(manifest("inference-service")["spec"]["predictor"]["terminationGracePeriodSeconds"])


@pytest.mark.programs
def test_a_pod_has_drained_before_it_is_killed() -> None:
    assert sum(times().values()) < grace()


def test_a_model_may_take_as_long_to_load_as_the_gateway_lets_it() -> None:
    probe = container()["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] > LOAD_TIMEOUT


@pytest.mark.pages
def test_the_page_has_the_times_of_the_manifests() -> None:
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([\w.]+)` \| ([^|]*) \|", page, re.MULTILINE))
    probes = {
        name: f"`{probe['httpGet']['path']}` every {probe['periodSeconds']} s, {probe['failureThreshold']} missed"
        for name, probe in container().items()
        if name.endswith("Probe")
    }
    waits = {name: f"{seconds:.0f} s" for name, seconds in times().items()}
    assert rows == {**probes, **waits, "terminationGracePeriodSeconds": f"{grace()} s"}


@pytest.mark.pages
def test_a_probe_over_grpc_may_take_the_place_that_the_page_says() -> None:
    (said,) = re.findall(r"`(grpc: {[^`]*})`", (ROOT / PAGE).read_text(encoding="utf-8"))
    runtime = manifest("serving-runtime")
    (made,) = runtime["spec"]["containers"]
    for probe in (made["readinessProbe"], made["startupProbe"]):
        asked = probe.pop("httpGet")
        probe |= yaml.safe_load(said)
        assert probe["grpc"]["port"] == asked["port"]
    assert mistakes(runtime) == []


def command(*, on: str) -> list[str]:
    """The command of the pod: the image's entry point, with the args in the place of its CMD. `on` is the folder of the
    model, which is /mnt/models in the pod."""
    return [arg.replace("/mnt/models", on) for arg in Image(DEPLOY / "Dockerfile").command(container()["args"])]


@pytest.mark.programs
def test_the_model_is_where_kserve_puts_it() -> None:
    repository = in_force(command(on="/mnt/models"), environ())["repository"]
    assert (repository["model"], repository["roots"], repository["model_name"]) == ("/mnt/models", ["/mnt/models"], NAME)


@pytest.mark.programs
def test_a_service_allows_code_as_the_page_says() -> None:
    (said,) = [yaml.safe_load(block.text) for block in blocks(PAGE) if block.text.lstrip().startswith("args:")]
    service = manifest("inference-service")
    service["spec"]["predictor"]["model"] |= said
    assert mistakes(service) == []
    assert in_force([*command(on="/mnt/models"), *said["args"]], environ())["repository"]["code"] == ["/mnt/models"]


@pytest.mark.programs
def test_the_port_that_is_probed_is_the_one_that_is_served() -> None:
    listen = in_force(command(on="/mnt/models"), environ())["listen"]
    assert (listen["host"], listen["port"]) == ("0.0.0.0", 8080)
    probed = [probe["httpGet"]["port"] for name, probe in container().items() if name.endswith("Probe")]
    ports = {port["name"]: port["containerPort"] for port in container()["ports"]}
    assert (probed, ports) == ([8080] * 3, {"http1": 8080, "h2c": listen["grpc_port"], "metrics": 9090})
    # the first one is KServe's port 80
    assert next(iter(ports)) == "http1"


def test_it_asks_prometheus_to_the_port_of_the_metrics() -> None:
    asked, named = manifest("serving-runtime")["spec"]["annotations"], {v["name"]: v["value"] for v in container()["env"]}
    assert asked["prometheus.io/port"] == named["EVERYWIRE_METRICS__PORT"] == "9090"
    assert (asked["prometheus.io/scrape"], asked["prometheus.io/path"]) == ("true", "/metrics")


def test_it_may_write_to_memory_alone() -> None:
    rights, (mount,) = container()["securityContext"], container()["volumeMounts"]
    assert rights["readOnlyRootFilesystem"]
    assert rights["runAsNonRoot"]
    (volume,) = manifest("serving-runtime")["spec"]["volumes"]
    assert (mount["name"], mount["mountPath"], volume["emptyDir"]["medium"]) == (volume["name"], "/tmp", "Memory")


@pytest.mark.programs
def test_a_pod_of_kserve_answers_by_the_services_name(tmp_path: Path) -> None:
    folder, work = tmp_path / NAME, tmp_path / "work"
    folder.mkdir()
    work.mkdir()
    (file,) = [block for block in blocks(PAGE) if block.file]
    (tmp_path / file.file).write_text(file.text)
    port, probes = free_port(), [probe for name, probe in container().items() if name.endswith("Probe")]
    here = {"--host=0.0.0.0": "--host=127.0.0.1", "--port=8080": f"--port={port}"}
    grpc, metrics = free_port(), free_port()
    variables = environ() | {"EVERYWIRE_LISTEN__GRPC_PORT": str(grpc), "EVERYWIRE_METRICS__PORT": str(metrics)}
    with Container([here.get(arg, arg) for arg in command(on=str(folder))], work, variables, port=port) as pod:
        assert pod.await_event("serving")["models"] == [NAME]
        assert [pod.ask("GET", probe["httpGet"]["path"])[0] for probe in probes] == [200, 200, 200]
        assert pod.ask("GET", f"/v2/models/{NAME}/ready")[0] == 200
        assert sums(pod) == {"OUTPUT0": [6, 9], "OUTPUT1": [4, 5]}
        for more in (grpc, metrics):
            socket.create_connection(("127.0.0.1", more)).close()
        pod.terminate()
        assert pod.await_event("drain report")["clean"]
        assert pod.ended() == 0


def sums(pod: Container) -> dict[str, list[int]]:
    status, answer = pod.ask("POST", f"/v2/models/{NAME}/infer", REQUEST)
    assert status == 200, answer
    return {output["name"]: output["data"] for output in json.loads(answer)["outputs"]}
