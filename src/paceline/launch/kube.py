"""The API server of a Kubernetes cluster, through its Python client: create, read, delete.

Every way that it can refuse is said in the reader's words. Nothing is asked before a method is
called, and no credential is read from anywhere but the kubeconfig or the pod's own account.
"""

import importlib.util
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn
from urllib.parse import urlencode

import yaml

from paceline.errors import JobError, Problem, RunError
from paceline.job.packages import install_line
from paceline.record.log_files import natural

_TIMEOUT_S = (5.0, 30.0)
"""To connect, and to answer. A guess: webhooks may take 10 s by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """How the API calls the objects of one kind."""

    group: str
    """Empty for the core."""

    version: str
    plural: str


KINDS: Mapping[str, Kind] = {
    "ConfigMap": Kind(group="", version="v1", plural="configmaps"),
    "TrainingRuntime": Kind(
        group="trainer.kubeflow.org", version="v1alpha1", plural="trainingruntimes"
    ),
    "TrainJob": Kind(group="trainer.kubeflow.org", version="v1alpha1", plural="trainjobs"),
    "PyTorchJob": Kind(group="kubeflow.org", version="v1", plural="pytorchjobs"),
    "RayJob": Kind(group="ray.io", version="v1", plural="rayjobs"),
}


def check_client() -> Iterator[Problem]:
    if importlib.util.find_spec("kubernetes") is None:
        yield Problem(
            code="W020",
            what="Kubernetes' Python client is not installed",
            where="this Python",
            fix=f"{install_line('kubernetes')}, or see what would be submitted with --dry-run",
        )


class Refused(Exception):
    """The API server's answer is no; `status` is its HTTP code."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        self.message = message
        super().__init__(f"{status}: {message}")


class Api:
    """One cluster: of the kubeconfig's current context, or the one that this runs in."""

    def __init__(self) -> None:
        self._client: Any = None

    def create(self, each: Mapping[str, Any]) -> None:
        """One object.

        Raises:
            Refused: The server does not take it.
            RunError: It cannot be asked.
        """
        # A key that the cluster's version does not know is refused, and not dropped in silence.
        self._call("POST", self._path(each), dict(each), query=[("fieldValidation", "Strict")])

    def create_all(self, objects: Sequence[Mapping[str, Any]]) -> None:
        """All of them, or none: when one is refused those before it are deleted again.

        Raises:
            JobError: `W024` to `W025`, one is refused; with the server's words.
            RunError: The server cannot be asked, or does not let us (`W023`).
        """
        made: list[Mapping[str, Any]] = []
        try:
            for each in objects:
                self.create(each)
                made.append(each)
        except Refused as error:
            self._take_back(made)
            problem = _refusal(error, objects[len(made)])
            if error.status in (401, 403):  # the login's fault, and not the job's
                raise RunError(problem) from None
            raise JobError(problem) from None
        except BaseException:
            self._take_back(made)
            raise

    def get(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        """One object; None where it is not, or not any more."""
        try:
            found: dict[str, Any] = self._call("GET", self._place(kind, namespace, name))
        except Refused as error:
            if error.status == 404:
                return None
            _cannot(error)
        return found

    def delete(self, kind: str, namespace: str, name: str) -> bool:
        """One object with its pods, which get SIGTERM and their grace; whether it was there."""
        try:
            path = self._place(kind, namespace, name)
            self._call("DELETE", path, {"propagationPolicy": "Foreground"})
        except Refused as error:
            if error.status == 404:
                return False
            _cannot(error)
        return True

    def pods(self, namespace: str, labels: str) -> list[dict[str, Any]]:
        """By their labels, in the order of their names, of which numbers count as numbers."""
        path = f"/api/v1/namespaces/{namespace}/pods"
        try:
            found = self._call("GET", path, query=[("labelSelector", labels)])
        except Refused as error:
            _cannot(error)
        items: list[dict[str, Any]] = found.get("items") or []
        return sorted(items, key=lambda each: natural(str(each["metadata"]["name"])))

    def log(
        self, namespace: str, pod: str, *, follow: bool, write: Callable[[bytes], None]
    ) -> None:
        """What a pod's container has printed, and with `follow` prints until it ends."""
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}/log"
        query = [("follow", "true")] if follow else []
        try:
            answer = self._call("GET", path, query=query, streams=True)
        except Refused as error:
            _cannot(error)
        for part in answer.stream(8192):
            write(part)

    def _path(self, each: Mapping[str, Any]) -> str:
        return self._place(each["kind"], each["metadata"]["namespace"])

    def _place(self, kind: str, namespace: str, name: str = "") -> str:
        known = KINDS[kind]
        root = f"/apis/{known.group}/{known.version}" if known.group else f"/api/{known.version}"
        place = f"{root}/namespaces/{namespace}/{known.plural}"
        return f"{place}/{name}" if name else place

    def _take_back(self, made: Sequence[Mapping[str, Any]]) -> None:
        for each in reversed(made):
            metadata = each["metadata"]
            try:
                self.delete(each["kind"], metadata["namespace"], metadata["name"])
            except (RunError, Refused):
                return  # it was said already that the server is gone, or does not let us

    def _call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Sequence[tuple[str, str]] = (),
        streams: bool = False,
    ) -> Any:
        # The client's own connections and login, and nothing of its models: those differ between
        # its releases, and the API's paths do not.
        client = self._connected()
        from urllib3 import Timeout  # comes with the client
        from urllib3.exceptions import HTTPError

        host = str(client.configuration.host)
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        for each in client.configuration.auth_settings().values():
            if each["in"] == "header" and each["value"]:
                headers[each["key"]] = each["value"]
        connect_s, answer_s = _TIMEOUT_S
        try:
            answer = client.rest_client.pool_manager.request(
                method,
                f"{host.rstrip('/')}{path}" + (f"?{urlencode(query)}" if query else ""),
                body=None if body is None else json.dumps(body).encode(),
                headers=headers,
                timeout=Timeout(connect=connect_s, read=None if streams else answer_s),
                preload_content=not streams,
                retries=1,
            )
        except HTTPError as error:
            raise RunError.of(
                code="W022",
                what=f"the cluster is not reached: {_root_of(error)}",
                where=host,
                fix="see that it is up, and that `kubectl config current-context` is the one "
                "you mean",
            ) from None
        if answer.status >= 400:
            raise Refused(answer.status, _words_of(answer.data, answer.reason))
        return answer if streams else json.loads(answer.data or b"{}")

    def _connected(self) -> Any:
        """
        Raises:
            RunError: `W021`, there is no kubeconfig, or it is damaged; `W023`, its login fails.
        """
        if self._client is None:
            RunError.raise_for(check_client())
            from kubernetes import client

            configuration = client.Configuration()
            _log_in(configuration)
            try:
                self._client = client.ApiClient(configuration)
                _ = self._client.rest_client.pool_manager  # reads the certificates
            except (OSError, ValueError) as error:
                raise RunError(_unknown(error)) from None
        return self._client


_BROKEN = (OSError, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError)
"""What the client (36) raises at a kubeconfig that is a folder, no text, no YAML, a list, or has a
certificate that is none: it checks few of its parts."""


def _log_in(configuration: Any) -> None:
    from kubernetes import config

    said = _Said()
    root = logging.getLogger()
    root.addHandler(said)  # a login program that fails is only logged, and nobody is logged in
    try:
        config.load_kube_config(client_configuration=configuration)
    except config.ConfigException as error:
        try:
            config.load_incluster_config(client_configuration=configuration)
        except config.ConfigException:
            raise RunError(_unknown(error)) from None
    except _BROKEN as error:
        raise RunError(_unknown(error)) from None
    finally:
        root.removeHandler(said)
    if said.errors:
        raise RunError.of(
            code="W023",
            what=f"the kubeconfig's login does not work: {said.errors[-1]}",
            where="KUBECONFIG, ~/.kube/config",
            fix="log in again, or install the login program that the kubeconfig names",
        )


class _Said(logging.Handler):
    """Keeps errors that are only logged."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.errors: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.errors.append(" ".join(record.getMessage().split())[:300])


def _unknown(error: Exception) -> Problem:
    return Problem(
        code="W021",
        what=f"no cluster is known here: {' '.join(str(error).split())[:300]}",
        where="KUBECONFIG, ~/.kube/config",
        fix="log in to your cluster, or see what would be submitted with --dry-run",
    )


def _refusal(error: Refused, each: Mapping[str, Any]) -> Problem:
    kind, name = each["kind"], each["metadata"]["name"]
    where = f"{kind} {name} in {each['metadata']['namespace']}"
    if error.status in (401, 403):
        return _forbidden(error, where)
    if error.status == 404:
        known = KINDS[kind]
        what = f"the cluster has no {kind}, or no namespace {each['metadata']['namespace']}"
        fix = f"install what defines {known.plural}.{known.group}, or set kubernetes.api to what "
        return Problem(
            code="W024", what=f"{what}: {error.message}", where=where, fix=f"{fix}it has"
        )
    if error.status == 409:
        return Problem(
            code="W025",
            what=f"there is a {kind} {name} already",
            where=where,
            fix="end that run (paceline stop), or give the job another name",
        )
    return Problem(
        code="W025",
        what=f"the cluster does not take the {kind}: {error.message}",
        where=where,
        fix="change what the job file's section `kubernetes` asks for",
    )


def _cannot(error: Refused) -> NoReturn:
    if error.status in (401, 403):
        raise RunError(_forbidden(error, "the cluster"))
    raise RunError.of(
        code="W022",
        what=f"the cluster answers {error.status}: {error.message}",
        where="the cluster",
        fix="check its health: kubectl get --raw /readyz",
    )


def _forbidden(error: Refused, where: str) -> Problem:
    if error.status == 401:
        return Problem(
            code="W023",
            what="the cluster does not know you: the login of the kubeconfig has expired, or is "
            "of another cluster",
            where=where,
            fix="log in again, then try `kubectl auth whoami`",
        )
    return Problem(
        code="W023",
        what=f"the cluster knows you, and does not let you: {error.message}",
        where=where,
        fix="ask for a role that may create, get and delete it in that namespace, or set "
        "kubernetes.namespace to one of yours",
    )


def _words_of(body: bytes, reason: str | None) -> str:
    try:
        said = str(json.loads(body)["message"])
    except (TypeError, ValueError, KeyError):
        said = body.decode(errors="replace") or reason or "no reason given"
    return " ".join(said.split())[:500]


def _root_of(error: BaseException) -> str:
    reason = getattr(error, "reason", None)
    return _root_of(reason) if isinstance(reason, BaseException) else str(error)[:300]
