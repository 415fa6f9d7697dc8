"""The Application Auto Scaling calls of docs/howto/sagemaker-container.md are valid by botocore's service model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest

from tests.docs.pages import blocks

CAPACITY = 64
PAGE = [
    json.loads(b.text)
    for b in blocks("docs/howto/sagemaker-container.md")
    if b.section == "Scale an endpoint" and b.language == "json"
]
CALLS = dict(zip(("RegisterScalableTarget", "PutScalingPolicy"), PAGE, strict=True))
Mistakes = Callable[[str, dict[str, Any]], list[str]]


def no_values(shape: Any, value: Any, at: str = "") -> Iterator[str]:
    """Texts that are not of the values of their enumeration: botocore leaves those to the service."""
    if shape.type_name == "structure":
        for name, member in value.items():
            yield from no_values(shape.members[name], member, f"{at}.{name}")
    elif getattr(shape, "enum", None) and value not in shape.enum:
        yield f"{at} is {value}"


@pytest.fixture(scope="module")
def mistakes(needs: Callable[[str, str], Any]) -> Mistakes:
    session = needs("boto3", "botocore.session").get_session()
    validator = needs("boto3", "botocore.validate").ParamValidator()
    model = session.get_service_model("application-autoscaling")

    def mistakes(operation: str, request: dict[str, Any]) -> list[str]:
        shape = model.operation_model(operation).input_shape
        report = validator.validate(request, shape)
        return [report.generate_report()] if report.has_errors() else list(no_values(shape, request))

    return mistakes


@pytest.mark.parametrize("operation", CALLS)
def test_the_page_has_a_request_of_the_service(operation: str, mistakes: Mistakes) -> None:
    assert mistakes(operation, CALLS[operation]) == []


def test_a_wrong_one_would_be_seen(mistakes: Mistakes) -> None:
    policy = deepcopy(CALLS["PutScalingPolicy"])
    tracking = policy["TargetTrackingScalingPolicyConfiguration"]
    tracking["PredefinedMetricSpecification"]["PredefinedMetricType"] = "SageMakerVariantStreams"
    assert mistakes("PutScalingPolicy", policy) == [
        ".TargetTrackingScalingPolicyConfiguration.PredefinedMetricSpecification.PredefinedMetricType is SageMakerVariantStreams"
    ]
    tracking["Target"] = tracking.pop("TargetValue")
    assert "TargetValue" in mistakes("PutScalingPolicy", policy)[0]


def test_both_are_about_one_variant_and_the_target_leaves_room() -> None:
    target, policy = CALLS.values()
    same = ("ServiceNamespace", "ResourceId", "ScalableDimension")
    assert [target[key] for key in same] == [policy[key] for key in same]
    tracking = policy["TargetTrackingScalingPolicyConfiguration"]
    assert tracking["TargetValue"] == pytest.approx(0.6 * CAPACITY)
    assert tracking["ScaleInCooldown"] >= 600
    assert 0 < target["MinCapacity"] <= target["MaxCapacity"]
