"""Checks of rights: of the user, and of the operator's ServiceAccount. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence

from lmcache_cli.commands.doctor.answers import ApiAnswer
from lmcache_cli.commands.doctor.checks.installation import upgrade
from lmcache_cli.commands.doctor.facts import Facts, Right
from lmcache_cli.commands.doctor.results import Result, failure, first_of, ok, unknown, warning
from lmcache_operator.api import GROUP, PLURAL, PROFILE_PLURAL
from lmcache_operator.specs.kinds import CHILDREN, CLUSTER
from lmcache_operator.specs.merge import dig

PROXY, FORWARD = Right("get", "", "pods/proxy"), Right("create", "", "pods/portforward")
CREATE_PODS = Right("create", "", "pods")
"""Right to try whether the API server admits pods."""
USER_RIGHTS: Mapping[Right, str] = {
    Right("get", GROUP, PLURAL): "reads LMCacheClusters",
    Right("list", GROUP, PLURAL): "finds LMCacheClusters",
    Right("list", "", "pods"): "shows pods",
    Right("get", "", "pods/log"): "shows logs",
    PROXY: "reads sidecars",
    FORWARD: "reads sidecars behind network policies",
}
"""Rights that the commands of `kubectl lmcache` use, with what each right is for."""

_READ, _CREATE = ("get", "list", "watch"), ("create", "patch")
_CHILD = (*_READ, *_CREATE, "delete")
_OF_OPERATOR: Mapping[tuple[str, str], Sequence[str]] = {
    **{(kind.group, kind.plural): _CHILD for kind in (CLUSTER, *CHILDREN)},
    (GROUP, PROFILE_PLURAL): (*_READ, *_CREATE),
    (GROUP, f"{PLURAL}/status"): ("patch",),
    (GROUP, f"{PLURAL}/finalizers"): ("update",),
    ("", "secrets"): ("create",),
    ("", "pods"): ("list", "watch", "patch", "delete"),
    ("", "pods/resize"): ("patch",),
    ("", "events"): ("get", "list", *_CREATE),
    ("", "namespaces"): ("get",),
    ("", "pods/eviction"): ("create",),
    ("coordination.k8s.io", "leases"): ("create",),
}
"""Verbs that the chart grants the operator, by group and resource. A test compares this with the chart."""
OPERATOR_RIGHTS: Sequence[Right] = [
    Right(verb, group, resource) for (group, resource), verbs in _OF_OPERATOR.items() for verb in verbs
]


def user_rights(facts: Facts) -> Iterator[Result]:
    """Check the rights of the user that the other commands need."""
    allowed = dict(facts.user_rights)
    if allowed.get(PROXY):  # either right suffices to read sidecars
        allowed[FORWARD] = True
    missing = [right for right in USER_RIGHTS if allowed.get(right) is False]
    if missing:
        text = f'Your user lacks the right "{missing[0]}", which {USER_RIGHTS[missing[0]]}.'
        if len(missing) > 1:
            text += f" It also lacks: {', '.join(map(str, missing[1:]))}."
        remedy = "Let an administrator grant all rights of these commands:"
        yield warning(text, remedy, command=_grant(facts))._replace(missing_right=str(missing[0]))
    elif any(allowed.get(right) is None for right in USER_RIGHTS):
        yield unknown(ApiAnswer())
    else:
        yield ok("Your user may read LMCacheClusters, pods, logs and sidecars.")


def _grant(facts: Facts) -> str:
    """Return an administrator's commands that grant all rights to read, also sidecars through the proxy."""
    create = f"kubectl -n {facts.namespace} create"
    role = f"role lmcache-read --verb=get,list --resource={PLURAL}.{GROUP},pods,pods/log,pods/proxy"
    user = shlex.quote(dig(facts.user.object, "status", "userInfo", "username") or "USER")
    return f"{create} {role}\n{create} rolebinding lmcache-read --role=lmcache-read --user={user}"


def operator_rights(facts: Facts) -> Iterator[Result]:
    """Check that the operator's ServiceAccount has the rights of the chart in the namespace."""
    if not facts.operators.items:
        return
    if not facts.operator_rights or None in facts.operator_rights.values():
        yield unknown(facts.operator_rights_problem)
        return
    missing = [str(right) for right, is_allowed in facts.operator_rights.items() if not is_allowed]
    if missing:
        text = f"The operator lacks rights in namespace {facts.namespace}: {first_of(missing)}."
        remedy = "Let the chart create its roles again, in a checkout of its version:"
        yield failure(text, remedy, "ApiError", upgrade(facts))
    else:
        yield ok("The operator has all rights of the chart.")
