"""`deltic serve --replicas`: several engines on a Ray cluster behind one front."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Mapping
from contextlib import ExitStack
from ssl import SSLContext
from typing import TYPE_CHECKING, Any

from deltic.cli import options
from deltic.cli.options import engine_options, open_llm
from deltic.cli.output import note
from deltic.cli.parser import UsageError
from deltic.cli.serve import encoders_of, is_for_chat, listener_of, loads_on_demand, prepare_llm, request_log_of
from deltic.config import EngineConfig, Limits
from deltic.config.machine import available_cores

if TYPE_CHECKING:
    from ray.serve import Application

    from deltic.cluster.application import ReplicaPlan
    from deltic.cluster.replica import OpenedReplica

Keys = Mapping[str, str | None]


def serve_replicas(args: argparse.Namespace, keys: Keys, tls: SSLContext | None) -> int:
    """Serves replicas until Ctrl-C or SIGTERM."""
    from deltic.cluster.application import check_ray, running

    if loads_on_demand(args):
        raise UsageError("--replicas serves one MODEL: leave out --model, --idle-unload and --models-memory")
    check_ray()
    from deltic.server.run import Server, hosts_of, url_of

    limits = engine_options(args).get("limits", Limits())
    with listener_of(args) as listener:
        hosts = hosts_of(listener, args.allowed_host, args.host or "127.0.0.1")
        plan = plan_of(args, keys, hosts, spread=args.ray_address is None)
        count = f"{args.replicas} replicas" + (f" and {plan.prefill} prefill replicas" if plan.prefill else "")
        note(f"starting {count} on {args.ray_address or 'a new Ray cluster on this machine'}")
        with running(plan, args.ray_address) as (handle, prefill):
            from deltic.cluster.front import front_app

            app, url = front_app(handle, limits, prefill), url_of(listener, tls is not None)
            ready = (f"{args.served_name or args.model or 'tiny'} is ready on {count}: {url}/v1 (OpenAI), {url}/ (chat "
                     f"page), {url}/health, {url}/metrics. Ctrl-C ends.")
            gc.collect()
            Server(app, app.state.work, args.drain_seconds, lambda: print(ready, flush=True), limits,
                   tls).run_on(listener)
    return 0


def application(given: Mapping[str, Any]) -> Application:
    """Returns the application for a config file of `serve deploy`. The file has import_path:
    deltic.cli.cluster:application, and as args the options of `deltic serve` by name."""
    from deltic.cli import command_parser
    from deltic.cluster.application import check_ray, with_ingress

    check_ray()
    parser = command_parser("serve")
    args = parser.parse_mixed(options.words_of(parser, "args", dict(given)))
    if args.replicas is None:
        args.replicas = 1
    if args.tls_certificate or args.unix_socket or args.port is not None or args.host is not None:
        raise UsageError("host, port, tls_certificate and unix_socket belong to Serve's http_options in the file")
    keys = dict.fromkeys(args.api_key)
    return with_ingress(plan_of(args, keys, args.allowed_host or ("*",)), engine_options(args).get("limits", Limits()))


def plan_of(args: argparse.Namespace, keys: Keys, hosts: Any, spread: bool = False) -> ReplicaPlan:
    """Returns the plan by which the replicas run. spread: they share the processors of this machine."""
    from deltic.cluster.application import ReplicaPlan
    from deltic.engine.arguments import settled

    config = settled(EngineConfig(**engine_options(args)))
    own, prefill = argparse.Namespace(**vars(args)), args.prefill_replicas or 0
    if prefill and not config.cache_dir:
        raise UsageError("--prefill-replicas hands prompts over through a directory that all replicas share: give "
                         "--cache-dir DIR, such as one below /dev/shm on one machine")
    if prefill and not is_for_chat(args):
        raise UsageError(f"--prefill-replicas computes prompts of chats, and {args.model} is served for vectors or "
                         "scores alone: leave it out")
    threads = config.threads
    if spread and threads is None and not config.on_gpu and isinstance(args.replicas, int):
        threads = own.engine_threads = max(available_cores() // (args.replicas + prefill), 1)
    gpus = config.shards if config.on_gpu else 0
    return ReplicaPlan(open_replica, (own, dict(keys), tuple(hosts)), args.replicas, prefill,
                       cpus=1 if gpus else threads or 1, gpus=gpus, drain_seconds=args.drain_seconds)


def open_replica(parts: tuple[argparse.Namespace, dict[str, str | None], tuple[str, ...]]) -> OpenedReplica:
    """Loads the model in the process of a replica."""
    from deltic import __version__
    from deltic.cluster.identity import files_identity
    from deltic.cluster.replica import OpenedReplica
    from deltic.server.app import create_app, create_encoder_app

    args, keys, hosts = parts
    shared = {"api_keys": keys, "allowed_hosts": hosts, "lenient": args.lenient, "cors_origins": args.cors_origin,
              "share_prefix_cache": args.share_prefix_cache, "request_log": request_log_of(args)}
    stack = ExitStack()
    chat = is_for_chat(args)
    encoders = stack.enter_context(encoders_of(args, for_chat=chat))
    if not chat:
        limits = engine_options(args).get("limits", Limits())
        return OpenedReplica(create_encoder_app(encoders, limits, **shared), None, __version__, stack.close)
    llm = open_llm(args)
    stack.callback(llm.close)
    prepare_llm(args, llm)
    llm.warm_up()
    path = llm.runtime.path
    identity = f"{__version__} {files_identity(path) if path else llm.runtime.name}"
    app = create_app(llm, served_name=args.served_name, encoders=encoders, state_dir=args.state_dir, **shared)
    return OpenedReplica(app, llm.worker, identity, stack.close)
