"""Reads all facts at the same time, within the user's time. A read that fails becomes a fact, too."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from itertools import chain, islice
from typing import Any
from urllib.parse import quote

from lmcache_cli.commands.connection import ApiConnection, api_offset, no_cluster
from lmcache_cli.commands.doctor.answers import ApiAnswer
from lmcache_cli.commands.doctor.checks.admission import num_missing, pod_of
from lmcache_cli.commands.doctor.checks.engines import engine_container, kind_of_pod
from lmcache_cli.commands.doctor.checks.features import uses_nodes
from lmcache_cli.commands.doctor.checks.rights import CREATE_PODS, OPERATOR_RIGHTS, USER_RIGHTS
from lmcache_cli.commands.doctor.facts import SYSTEM_NAMESPACE, ClusterFacts, Facts, PodTrial, Right
from lmcache_cli.commands.gather import PodFigures, natural_order, read_each, read_stats
from lmcache_operator.api import GROUP, PLURAL, PROFILE_PLURAL, VERSION
from lmcache_operator.components.engine.kinds.base import words_of
from lmcache_operator.errors import QUOTA, NoAnswerError
from lmcache_operator.kube.pod_http import Get, PodHttp
from lmcache_operator.kube.refusals import error_of, with_field
from lmcache_operator.pods.pods import is_ready
from lmcache_operator.specs import Object, names
from lmcache_operator.specs.merge import dig
from lmcache_store.common.text import plain

_ALL, _READ, _POD, _HEAD_START = 0.76, 0.6, 0.4, 0.1
"""Parts of the user's time for all reads, one read, one pod, and reads before pods. The program starts in
the rest."""
_UNDECIDED = (401, 408, 429, 502, 503, 504)
_NO_DRY_RUN = "does not support dry run"
"""Statuses, and part of a message, with which the API server does not say whether it admits an object."""
_MAX_NODES = 4
_MAX_ENGINES = 4
"""Engines to read of each cluster. All engine pods of a cluster come from one template."""
_MIN_SECONDS = 0.1
_MAX_BYTES = 64 << 20
"""Largest answer of the API server. A list of 1,000 pods has about 10 MiB."""
_ADMISSION, _ADMISSION_VERSIONS = "admissionregistration.k8s.io", ("v1", "v1beta1")
_OPERATOR_SELECTOR = ",".join(f"{key}={value}" for key, value in names.OPERATOR_LABELS.items())
_PART_OF = f"app.kubernetes.io/part-of={names.OPERATOR_LABELS['app.kubernetes.io/part-of']}"
_REVIEW = "create subjectaccessreviews.authorization.k8s.io"
_USER = "/apis/authentication.k8s.io/v1/selfsubjectreviews"


async def read_facts(
    connection: ApiConnection, name: str | None, operator_namespace: str, *, seconds: float = 5.0
) -> Facts:
    """Read everything that the checks need. ``name``: the cluster to check; None: all of the namespace.

    ``seconds``: time for the whole answer of the command.

    Raises:
        NoAnswerError: the API server cannot be reached.
        NotFoundError: the namespace has no cluster of this name.
        UnavailableError: the answer is not one of a Kubernetes API server.
    """
    reader = _Reader(connection, name, seconds)
    listed = await reader.clusters()
    of_api_server = asyncio.gather(
        reader.definitions(),
        reader.fixed(),
        reader.operators(operator_namespace),
        reader.policies(),
        reader.rights(USER_RIGHTS),
        api_offset(connection.api, _READ * seconds),
    )
    pods = await reader.clusters_with_pods(listed, of_api_server)
    definitions, fixed, operators, policies, user_rights, offset = await of_api_server
    return Facts(
        namespace=connection.namespace,
        context=connection.context,
        options=connection.flags,
        now=time.time(),
        definitions=definitions,
        listed_clusters=listed,
        api_offset_seconds=offset,
        user_rights=user_rights,
        has_one_cluster=name is not None,
        unanswered=reader.unanswered,
        **fixed,
        **pods,
        **operators,
        **policies,
    )


class _Reader:
    """Reads of one run, which share a deadline."""

    def __init__(self, connection: ApiConnection, name: str | None, seconds: float) -> None:
        self._api, self._namespace, self._name = connection.api, connection.namespace, name
        self._loop, self._user_seconds = asyncio.get_running_loop(), seconds
        self._deadline = self._loop.time() + _ALL * seconds
        self.unanswered = dict[str, str]()
        """See `Facts.unanswered`."""

    @property
    def _seconds(self) -> float:
        return max(_MIN_SECONDS, self._deadline - self._loop.time())

    async def get(self, path: str, right: str) -> ApiAnswer:
        """Read an object or a list. ``right``: the right that this needs."""
        seconds = min(_READ * self._user_seconds, self._seconds)
        return self._answer(path, *await self._api.read(path, seconds=seconds, max_bytes=_MAX_BYTES), right)

    def _answer(self, path: str, status: int, body: bytes, right: str) -> ApiAnswer:
        """Parse an answer of the API server. ``right``: the right that the request needs."""
        if status == HTTPStatus.FORBIDDEN:
            return ApiAnswer(status, missing_right=right)
        try:
            parsed = json.loads(body)
        except (ValueError, RecursionError):
            parsed = None
        if status == HTTPStatus.NOT_FOUND:
            return ApiAnswer(status, parsed)
        if status in (HTTPStatus.OK, HTTPStatus.CREATED) and isinstance(parsed, dict):
            return ApiAnswer(HTTPStatus.OK, parsed)
        text = plain(error_of(path, status, body).message)
        self.unanswered[path.partition("?")[0]] = f"HTTP {status}: {text}" if status else text
        return ApiAnswer()

    async def each(self, reads: Mapping[str, tuple[str, str]]) -> dict[str, ApiAnswer]:
        """Read several objects or lists, by any name. ``reads``: the arguments of `get`."""
        answers = await asyncio.gather(*(self.get(path, right) for path, right in reads.values()))
        return dict(zip(reads, answers, strict=True))

    async def definitions(self) -> dict[str, ApiAnswer]:
        """Read the CustomResourceDefinitions, by name."""
        path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        right = "get customresourcedefinitions.apiextensions.k8s.io"
        names = (f"{plural}.{GROUP}" for plural in (PLURAL, PROFILE_PLURAL))
        return await self.each({name: (f"{path}/{name}", right) for name in names})

    async def fixed(self) -> dict[str, Any]:
        """Read what depends on no other read. Returns fields of `Facts`."""
        profiles = f"/apis/{GROUP}/{VERSION}/namespaces/{self._namespace}/{PROFILE_PLURAL}"
        reads = {
            "version": ("/version", "get /version"),
            "core": ("/api/v1", "get /api/v1"),
            "groups": ("/apis", "get /apis"),
            "namespace_object": (f"/api/v1/namespaces/{self._namespace}", "get namespaces"),
            "profiles": (profiles, f"list {PROFILE_PLURAL}.{GROUP}"),
        }
        review = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
        fields, (status, user, _) = await asyncio.gather(
            self.each(reads), self._api.ask(_USER, review, seconds=self._seconds)
        )
        return {**fields, "user": self._answer(_USER, status, user, "")}

    async def clusters(self) -> ApiAnswer:
        """Read the LMCacheClusters as a list. Raises NoAnswerError, NotFoundError or UnavailableError."""
        path = f"/apis/{GROUP}/{VERSION}/namespaces/{self._namespace}/{PLURAL}"
        if self._name is not None:
            path = f"{path}/{quote(self._name, safe='')}"
        answer = await self.get(path, f"{'list' if self._name is None else 'get'} {PLURAL}.{GROUP}")
        if not answer.status:
            raise NoAnswerError(f"GET {path}", self.unanswered[path])
        if self._name is None:
            return answer
        if answer.is_missing and isinstance(answer.body, dict):  # else the API server lacks the kind
            raise no_cluster(self._name, self._namespace)
        if not answer.object:
            return answer
        return answer._replace(body={"items": [with_field("metadata", answer.object)]})

    # ---- pods

    async def clusters_with_pods(self, listed: ApiAnswer, before: asyncio.Future[Any]) -> dict[str, Any]:
        """Read pods, sidecars, engines and nodes. Returns fields of `Facts`.

        ``before``: reads that go first for some time, because pods that hang would use all connections.
        """
        equals = f"={self._name}" if self._name is not None else ""
        path = f"/api/v1/namespaces/{self._namespace}/pods?labelSelector="
        of_clusters, injected = await asyncio.gather(
            *(
                self.get(path + quote(f"{label}{equals}"), "list pods")
                for label in (names.CLUSTER_LABEL, names.INJECT_LABEL)
            )
        )
        known = [resource["metadata"]["name"] for resource in listed.items]
        pods, shard_pods = dict[str, list[Object]](), dict[str, list[Object]]()
        for name in known:
            engine_pods = _labelled(of_clusters, names.selector(name, names.ENGINE))
            engine_pods += _labelled(injected, {names.INJECT_LABEL: name})
            pods[name] = sorted(engine_pods, key=natural_order)
            remote_pods = _labelled(of_clusters, names.selector(name, names.REMOTE))
            shard_pods[name] = sorted(remote_pods, key=natural_order)
        ready = {name: [pod for pod in pods[name] if is_ready(pod)][:_MAX_ENGINES] for name in known}
        await asyncio.wait((before,), timeout=_HEAD_START * self._user_seconds)
        http = PodHttp(self._api, seconds=min(_POD * self._user_seconds, self._seconds))
        read_engines = read_each(
            [*chain(*ready.values())], lambda pod: read_engine(http.get, pod), seconds=self._seconds
        )
        engines, stats, *more = await asyncio.gather(
            read_engines,
            read_stats(http.get, [*chain(*pods.values())], seconds=self._seconds),
            *map(self._details, listed.items, pods.values()),
        )
        left_engines, left_stats = iter(engines), iter(stats)
        clusters = [
            ClusterFacts(
                resource,
                pods=[*islice(left_stats, len(pods[name]))],
                shard_pods=shard_pods[name],
                engines=[*islice(left_engines, len(ready[name]))],
                **details,
            )
            for resource, name, details in zip(listed.items, known, more, strict=True)
        ]
        return {"cluster_pods": of_clusters, "injected_pods": injected, "clusters": clusters}

    async def _details(self, resource: Object, pods: Iterable[Object]) -> dict[str, Any]:
        """Try the pods of a cluster. Read its DeviceClass and nodes if its spec depends on them."""
        cluster = ClusterFacts(resource)
        details: dict[str, Any] = {"trials": await self._trials(cluster)}
        engine = cluster.parsed.spec.engine if cluster.parsed else None
        if engine and engine.gpu.device_class_name is not None:
            path = f"/apis/resource.k8s.io/v1/deviceclasses/{engine.gpu.device_class_name}"
            details["device_class"] = await self.get(path, "get deviceclasses.resource.k8s.io")
        if uses_nodes(cluster):
            nodes = sorted({node for pod in pods if (node := pod["spec"].get("nodeName"))})[:_MAX_NODES]
            details["nodes"] = await self.each({n: (f"/api/v1/nodes/{n}", "get nodes") for n in nodes})
        return details

    async def _trials(self, cluster: ClusterFacts) -> list[PodTrial]:
        """Try a pod of each StatefulSet: of the live one, or else of the rendered one."""
        selector = quote(f"{names.CLUSTER_LABEL}={cluster.name}")
        path = f"/apis/apps/v1/namespaces/{self._namespace}/statefulsets?labelSelector={selector}"
        live, allowed = await asyncio.gather(
            self.get(path, "list statefulsets.apps"), self._review(CREATE_PODS)
        )
        # Of several sets of a component, that with the most missing pods is the last one.
        sets = sorted(live.items, key=num_missing)
        of_labels = {dig(each, "metadata", "labels", names.COMPONENT_LABEL): each for each in sets}
        stateful_sets = cluster.stateful_sets | of_labels
        if allowed is not True:
            answer = allowed or ApiAnswer(missing_right=str(CREATE_PODS))
            return [PodTrial(component, answer) for component in stateful_sets]
        trials = await asyncio.gather(*(self._trial(*item) for item in stateful_sets.items()))
        # Running pods count in a quota, and who may not list StatefulSets does not know whether pods run.
        is_unsure = not live.is_known
        return [
            each._replace(answer=live) if is_unsure and QUOTA in each.refusal else each for each in trials
        ]

    async def _trial(self, component: str, stateful_set: Object) -> PodTrial:
        path = f"/api/v1/namespaces/{self._namespace}/pods?dryRun=All"
        status, body, warnings = await self._api.ask(path, pod_of(stateful_set), seconds=self._seconds)
        if status < HTTPStatus.BAD_REQUEST:
            return PodTrial(component, self._answer(path, status, body, ""), warnings=warnings)
        refusal = error_of("POST pods", status, body).message
        if status in _UNDECIDED or _NO_DRY_RUN in refusal:
            return PodTrial(component, ApiAnswer(problem=f"{plain(refusal)}."))
        return PodTrial(component, ApiAnswer(HTTPStatus.OK), refusal, warnings, num_missing(stateful_set))

    # ---- the installation

    async def operators(self, operator_namespace: str) -> dict[str, Any]:
        """Find the operator and its rights. Returns fields of `Facts`."""
        selector, right = f"?labelSelector={quote(_OPERATOR_SELECTOR)}", "list deployments.apps"
        within = f"/apis/apps/v1/namespaces/{operator_namespace or SYSTEM_NAMESPACE}/deployments{selector}"
        if operator_namespace:
            answer = await self.get(within, right)
        else:
            answer = await self.get(f"/apis/apps/v1/deployments{selector}", right)
            if not answer.is_known:
                in_system = await self.get(within, right)
                answer = in_system if in_system.items else answer
        # Tenants can label a Deployment of their own as an operator: remedies name the first one.
        answer.items.sort(key=lambda each: bool(each["metadata"]["namespace"] != SYSTEM_NAMESPACE))
        accounts = [
            f"system:serviceaccount:{each['metadata']['namespace']}:"
            f"{each['spec']['template']['spec'].get('serviceAccountName', 'default')}"
            for each in answer.items
        ]
        if not accounts:
            return {"operators": answer}
        place = answer.items[0]["metadata"]["namespace"]
        path = f"/api/v1/namespaces/{place}/pods?labelSelector={quote(_OPERATOR_SELECTOR)}"
        pods, first = await asyncio.gather(
            self.get(path, "list pods"), self._review(OPERATOR_RIGHTS[0], accounts[0])
        )
        fields = {"operators": answer, "operator_pods": pods}
        if isinstance(first, ApiAnswer):
            return fields | {"operator_rights_problem": first}
        return fields | {"operator_rights": await self.rights(OPERATOR_RIGHTS, accounts[0])}

    async def rights(self, rights: Iterable[Right], user: str = "") -> Mapping[Right, bool | None]:
        """Ask which rights a user has in the namespace. ``user``: a name; empty: the user of the command."""
        asked = list(rights)
        answers = await asyncio.gather(*(self._review(right, user) for right in asked))
        return {
            right: answer if isinstance(answer, bool) else None
            for right, answer in zip(asked, answers, strict=True)
        }

    async def _review(self, right: Right, user: str = "") -> bool | ApiAnswer:
        """Return whether a user has a right, or why this is unknown."""
        plural = "subjectaccessreviews" if user else "selfsubjectaccessreviews"
        attributes = right.attributes | {"namespace": self._namespace}
        spec = {"resourceAttributes": attributes} | ({"user": user} if user else {})
        body = {"apiVersion": "authorization.k8s.io/v1", "spec": spec}
        path = f"/apis/authorization.k8s.io/v1/{plural}"
        status, text, _ = await self._api.ask(path, body, seconds=self._seconds)
        allowed = dig((answer := self._answer(path, status, text, _REVIEW)).object, "status", "allowed")
        return answer if allowed is None else bool(allowed)

    async def policies(self) -> dict[str, Any]:
        """Read the admission policies of the chart, and their bindings. Returns fields of `Facts`."""
        kinds = ("mutatingadmissionpolicies", "mutatingadmissionpolicybindings")
        policies, bindings = await asyncio.gather(*map(self._admission, kinds))
        return {"policies": policies, "bindings": bindings}

    async def _admission(self, plural: str) -> ApiAnswer:
        answer = ApiAnswer()
        for version in _ADMISSION_VERSIONS:
            path = f"/apis/{_ADMISSION}/{version}/{plural}?labelSelector={quote(_PART_OF)}"
            answer = await self.get(path, f"list {plural}.{_ADMISSION}")
            if not answer.is_missing:
                break
        return answer


def _labelled(pods: ApiAnswer, labels: Mapping[str, str]) -> list[Object]:
    """Return the pods that have these labels."""
    return [pod for pod in pods.items if labels.items() <= (pod["metadata"].get("labels") or {}).items()]


async def read_engine(get: Get, pod: Object) -> PodFigures:
    """Read a ready engine: ``version`` and ``cache`` take the place of /stats."""
    kind, words = kind_of_pod(pod), words_of(engine_container(pod) or {})
    if kind.option(words, kind.certificate) is not None:
        return PodFigures(pod, problem="it serves HTTPS, which this command does not read")
    port = kind.int_option(words, "--port") or kind.default_port
    place = pod["metadata"]["namespace"], pod["metadata"]["name"], port
    answers = await asyncio.gather(*(get(*place, path) for path in kind.pages))
    if answers[0].missing_right:
        return PodFigures(pod, problem=f"forbidden: {answers[0].missing_right}")
    if HTTPStatus.OK not in [answer.status for answer in answers]:
        problem = plain(answers[0].body.decode(errors="replace")) or f"HTTP {answers[0].status}"
        return PodFigures(pod, problem=problem)
    bodies = [answer.body if answer.status == HTTPStatus.OK else b"" for answer in answers]
    return PodFigures(pod, kind.read_pages(bodies))
