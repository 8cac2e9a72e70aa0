"""Types of the pods that the operator builds, so that mypy refuses a misspelt field.

They have the fields that the operator sets, named as in the API of Kubernetes:
https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/
"""

from __future__ import annotations

from typing import Any, TypedDict


class EnvVar(TypedDict, total=False):
    """A variable of a container: a value, or the place that has the value."""

    name: str
    value: str
    valueFrom: dict[str, Any]


class Mount(TypedDict, total=False):
    """The place of a volume in a container."""

    mountPath: str
    name: str
    readOnly: bool


class ContainerPort(TypedDict):
    """A port of a container."""

    containerPort: int
    name: str
    protocol: str


class Probe(TypedDict, total=False):
    """A check that the kubelet repeats."""

    exec: dict[str, list[str]]
    failureThreshold: int
    httpGet: dict[str, Any]
    periodSeconds: int
    tcpSocket: dict[str, int]
    terminationGracePeriodSeconds: int
    timeoutSeconds: int


class Resources(TypedDict, total=False):
    """Quantities by resource, and claims by name."""

    claims: list[dict[str, str]]
    limits: dict[str, str]
    requests: dict[str, str]


class ContainerSecurity(TypedDict, total=False):
    """Rights of a container's processes."""

    allowPrivilegeEscalation: bool
    capabilities: dict[str, list[str]]
    readOnlyRootFilesystem: bool


class PodContainer(TypedDict, total=False):
    """A container of a pod."""

    args: list[str]
    command: list[str]
    env: list[EnvVar]
    image: str
    lifecycle: dict[str, Any]
    livenessProbe: Probe
    name: str
    ports: list[ContainerPort]
    readinessProbe: Probe
    resources: Resources
    restartPolicy: str
    securityContext: ContainerSecurity
    startupProbe: Probe
    terminationMessagePolicy: str
    volumeMounts: list[Mount]


class PodSpec(TypedDict, total=False):
    """The spec of a pod."""

    affinity: dict[str, Any]
    automountServiceAccountToken: bool
    containers: list[PodContainer]
    enableServiceLinks: bool
    imagePullSecrets: list[dict[str, str]]
    initContainers: list[PodContainer]
    nodeSelector: dict[str, str]
    priorityClassName: str
    resourceClaims: list[dict[str, str]]
    runtimeClassName: str
    schedulerName: str
    schedulingGroup: dict[str, str]
    securityContext: dict[str, Any]
    serviceAccountName: str
    terminationGracePeriodSeconds: int
    tolerations: list[dict[str, Any]]
    volumes: list[dict[str, Any]]


class Metadata(TypedDict, total=False):
    """Metadata of a pod template."""

    annotations: dict[str, str]
    labels: dict[str, str]


class PodTemplate(TypedDict):
    """The template of a controller's pods."""

    metadata: Metadata
    spec: PodSpec


class StatefulSetSpec(TypedDict):
    """The spec of a StatefulSet."""

    podManagementPolicy: str
    replicas: int
    selector: dict[str, dict[str, str]]
    serviceName: str
    template: PodTemplate
    updateStrategy: dict[str, str]
