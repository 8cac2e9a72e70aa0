"""A user's Deployment on a node, whose label refers to an LMCacheCluster, and its pods."""

from lmcache_operator.components.injection.pods import has_cache
from lmcache_operator.specs.names import INJECT_LABEL
from testing.kube.api import Object
from testing.node import app
from testing.node.cluster import NodeCluster
from testing.node.pods import Pod

_DEPLOYMENTS = "apps/v1/deployments"
USER = 1234
"""User id of the containers. None of the images uses it."""


class InjectedPods:
    """A Deployment with one pod that is like the engine of an LMCacheCluster, but only the pod's label refers
    to a cache.
    """

    def __init__(self, node: NodeCluster, name: str, cluster: Object, engine: Object) -> None:
        """Describe the Deployment without creating it.

        ``cluster`` has the settings of the cache, and the pod template of the engine. ``engine`` are the name
        and the command of the engine's container, and further fields.
        """
        self.node, self.name = node, name
        template, model = cluster["spec"]["engine"]["podTemplate"]["spec"], cluster["spec"]["model"]
        security: Object = {
            "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "runAsUser": USER,
        }  # fmt: skip
        (container,) = template["containers"]
        mounts = [{"name": "models", "mountPath": "/models"}, {"name": "shm", "mountPath": "/dev/shm"}]
        container = (
            container
            | engine
            | {
                "image": cluster["spec"]["engine"]["image"],
                "env": [*container["env"], *({"name": name, "value": "/tmp"} for name in ("HOME", "USER"))],
                "readinessProbe": {
                    "httpGet": {"path": "/health", "port": 8000},
                    "periodSeconds": 2,
                    "timeoutSeconds": 10,  # SGLang answers after a second or later
                },
                "securityContext": security,
                "volumeMounts": [*container["volumeMounts"], *mounts],
            }
        )
        shm = {"emptyDir": {"medium": "Memory"}}
        pod = {
            "containers": [container],
            "initContainers": [
                init_container | {"securityContext": security}
                for init_container in template.get("initContainers", [])
            ],
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "volumes": [*template["volumes"], {"name": "models", **model["volume"]}, {"name": "shm", **shm}],
        }
        labels = {"app": name, INJECT_LABEL: cluster["metadata"]["name"]}
        self._template: Object = {"metadata": {"labels": labels}, "spec": pod}

    def create(self) -> None:
        """Create the Deployment as soon as new pods get the cache. The LMCacheCluster must be applied."""
        trial = {**self._template, "metadata": self._template["metadata"] | {"name": "tried"}}
        # The API server reads LMCacheProfiles by a watch.
        path = f"{self.node.api.path('v1/pods', app.NAMESPACE)}?dryRun=All"
        self.node.wait(lambda: has_cache(self.node.api.request("POST", path, trial)), 60)
        spec = {"selector": {"matchLabels": {"app": self.name}}, "template": self._template}
        self.node.api.create(_DEPLOYMENTS, {"metadata": {"name": self.name}, "spec": spec}, app.NAMESPACE)

    def pods(self) -> list[Pod]:
        """The pods that exist."""
        objects = self.node.api.objects("v1/pods", app.NAMESPACE, f"app={self.name}")
        return [Pod(self.node, obj) for obj in objects]

    def ready_pod(self) -> Pod:
        """Wait until a pod is Ready, and return it."""
        return self.node.wait(
            lambda: next((pod for pod in self.pods() if pod.is_ready), None), app.READY_SECONDS
        )

    def delete(self) -> None:
        """Delete the Deployment, and wait until its pods are deleted."""
        self.node.api.delete(_DEPLOYMENTS, self.name, app.NAMESPACE)
        self.node.wait(lambda: not self.pods(), 180)
