"""What the operator itself is told: by flags, once, at its start."""

from __future__ import annotations

from dataclasses import dataclass

from . import __version__


@dataclass(frozen=True, kw_only=True)
class RenderSettings:
    """The part of the settings that shapes rendered objects."""

    engine_image: str = "vllm/vllm-openai:v0.32.0"
    """Used where a cluster names no engine image."""
    sidecar_image: str = f"ghcr.io/lmcache-cluster/sidecar:{__version__}"
    """Used where a cluster names no sidecar image."""
    allow_all_gpus_sidecar: bool = False
    """Whether a sidecar may see all GPUs of its node, also those of other tenants."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of `lmcache-operator run`."""

    namespaces: tuple[str, ...] = ()
    """Namespaces to watch; empty: all of them."""
    kubeconfig: str | None = None
    """Path of a kubeconfig; None: $KUBECONFIG, else the pod's own ServiceAccount, else ~/.kube/config."""
    health_port: int = 8080
    metrics_port: int = 9465
    num_workers: int = 16
    """Clusters reconciled at the same time."""
    resync_seconds: float = 600.0
    """Every cluster is looked at this often even when nothing was reported about it; jittered by 10 %."""
    render: RenderSettings = RenderSettings()
