"""The replicas as a Ray Serve application, deployed by `deltic serve --replicas`, or from a file by `serve deploy`.

    deltic serve --replicas 4              deltic's own server with the front, in this process; no proxy of Serve
    serve run / serve deploy FILE          the front as Serve's ingress, behind Serve's proxies on each node
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from deltic.cluster.identity import NOT_SHARED
from deltic.config import Limits
from deltic.errors import ConfigError, UnavailableError

if TYPE_CHECKING:
    from ray.serve import Application, Deployment
    from ray.serve.handle import DeploymentHandle
    from starlette.applications import Starlette

    from deltic.cluster.replica import OpenedReplica

log = logging.getLogger("deltic")

RAY: Final = (2, 60)
"""The required version of Ray. The interface of its request routers is not stable between versions."""
NAME: Final = "deltic"
PREFILL: Final = "prefill"
"""Name of the deployment of prefill replicas."""
_ROUTER: Final = "deltic.cluster.serve_router.StateAwareRouter"
_REPORT_SECONDS: Final = 1.0
_UNBOUNDED: Final = 100_000
"""Maximum number of requests that Serve sends to one replica. Its own limits refuse more, as on one machine."""
_TARGET, _MOST_REPLICAS = 16, 100
"""Autoscaling: target number of requests per replica, and maximum replicas, unless a `serve deploy` file sets them."""
_SHUTDOWN_SECONDS: Final = 15.0


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """options: for `opener`. replicas: their number, or "auto" for Serve's autoscaling. prefill: number of replicas
    that compute long prompts for them. cpus, gpus: devices that Ray reserves for each. drain_seconds: for running
    requests of a replica that ends. router: class of the request router; empty: Serve's own."""

    opener: Callable[[Any], OpenedReplica]
    options: Any
    replicas: int | str = 1
    prefill: int = 0
    cpus: float = 1.0
    gpus: float = 0.0
    drain_seconds: float = 30.0
    router: str | type = _ROUTER


def check_ray() -> None:
    """Raises ConfigError if Ray is missing or of another version."""
    remedy = "install it with: pip install 'deltic[cluster]'"
    try:
        import ray
        import ray.serve
    except ImportError as error:
        raise ConfigError(f"replicas needs Ray Serve, which is not there ({error}): {remedy}", "replicas") from error
    if tuple(map(int, ray.__version__.split(".")[:2])) != RAY:
        raise ConfigError(f"replicas needs Ray {RAY[0]}.{RAY[1]}, and {ray.__version__} is installed: {remedy}",
                          "replicas")


def replicas_of(plan: ReplicaPlan) -> Application:
    """Returns the deployment of the replicas, with the deployment of the prefill replicas below it."""
    prefill = _deployment(plan, PREFILL, plan.prefill).bind(plan.opener, plan.options) if plan.prefill else None
    return _deployment(plan, "replica", plan.replicas).bind(plan.opener, plan.options, prefill)


def _deployment(plan: ReplicaPlan, name: str, replicas: int | str) -> Deployment:
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    from deltic.cluster.replica import Replica

    router = {"request_router_class": plan.router} if plan.router else {}
    routing = RequestRouterConfig(**router, request_routing_stats_period_s=_REPORT_SECONDS)
    count: dict[str, Any] = {"num_replicas": replicas}
    if replicas == "auto":
        count["autoscaling_config"] = {"min_replicas": 1, "max_replicas": _MOST_REPLICAS,
                                       "target_ongoing_requests": _TARGET}
    return serve.deployment(
        Replica, name=name, **count, max_ongoing_requests=_UNBOUNDED,
        graceful_shutdown_timeout_s=plan.drain_seconds, health_check_period_s=2.0, health_check_timeout_s=30.0,
        ray_actor_options={"num_cpus": plan.cpus, "num_gpus": plan.gpus},
        logging_config=_quiet(), request_router_config=routing)


def with_ingress(plan: ReplicaPlan, limits: Limits) -> Application:
    """Returns an application with the front as Serve's ingress."""
    from ray import serve

    deployment = serve.deployment(serve.ingress(None)(Ingress), name="front", max_ongoing_requests=_UNBOUNDED,
                                  ray_actor_options={"num_cpus": 0})
    return deployment.bind(replicas_of(plan), limits, PREFILL if plan.prefill else "")


class Ingress:
    """The front as a deployment of Serve."""

    def __init__(self, handle: DeploymentHandle, limits: Limits, prefill: str) -> None:
        """prefill: name of the deployment of prefill replicas, if there is one."""
        self._parts = handle, limits, prefill

    def __serve_build_asgi_app__(self) -> Starlette:
        from ray import serve

        from deltic.cluster.front import front_app

        handle, limits, prefill = self._parts
        return front_app(handle, limits, serve.get_deployment_handle(prefill) if prefill else None)


@contextmanager
def running(plan: ReplicaPlan, address: str | None, name: str = NAME
            ) -> Iterator[tuple[DeploymentHandle, DeploymentHandle | None]]:
    """Runs the replicas on the cluster at an address, or on a new one on this machine. Yields the handles of replicas
    and of prefill replicas. Deletes the application at the end. Raises UnavailableError if the replicas do not start,
    or are not equal."""
    import ray
    from ray import serve

    try:
        local = {} if address else {"num_cpus": _local_cpus(plan), "include_dashboard": False}
        ray.init(address=address or "local", ignore_reinit_error=True, logging_level=logging.WARNING, **local)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(f"the Ray cluster at {address} cannot be reached: {error}", "ray_address") from error
    try:
        serve.start(proxy_location="Disabled", logging_config=_quiet())
        try:
            handle = serve.run(replicas_of(plan), name=name, route_prefix=None)
        except RuntimeError as error:
            raise UnavailableError(f"the replicas did not start: {_cause(name) or error}") from error
        prefill = serve.get_deployment_handle(PREFILL, name) if plan.prefill else None
        found = [each for one in (handle, prefill) if one
                 for each in one.broadcast("identity").results(timeout_s=_SHUTDOWN_SECONDS)]
        check_identities(found, shared=plan.prefill > 0)
        yield handle, prefill
    finally:
        with contextlib.suppress(Exception):
            serve.delete(name)
            if address is None:
                serve.shutdown()
        ray.shutdown()


def _quiet() -> dict[str, Any]:
    """Returns Serve's logging options: warnings only, because the replicas log what matters."""
    return {"log_level": "WARNING", "enable_access_log": False}


def check_identities(found: list[dict[str, str]], shared: bool = False) -> None:
    """Raises UnavailableError if replicas have different weights or, with `shared`, different cache directories."""
    nodes: dict[str, list[str]] = {}
    for each in found:
        nodes.setdefault(each["identity"], []).append(each["node"])
    if len(nodes) > 1:
        shown = "; ".join(f"{identity}: {', '.join(sorted(set(own)))}" for identity, own in nodes.items())
        raise UnavailableError("the replicas have different weights, so that their answers and states would not fit "
                               f"together ({shown}): copy the same model to all nodes")
    directories = {each["directory"] for each in found} if shared else set()
    if len(directories) > 1 or "" in directories:
        raise UnavailableError(NOT_SHARED)


def _local_cpus(plan: ReplicaPlan) -> int:
    """Returns the CPU count of a local cluster. It is large enough for all replicas, even if they share processors."""
    from deltic.config.machine import available_cores

    wanted = plan.cpus * (plan.prefill + (plan.replicas if isinstance(plan.replicas, int) else 1))
    return max(int(wanted) + 1, available_cores())


def _cause(name: str) -> str:
    """Returns Serve's messages about replicas that did not start."""
    from ray import serve

    found = serve.status().applications.get(name)
    messages = [each.message for each in found.deployments.values() if each.message] if found else []
    return " ".join(messages)[-600:]
