"""`openenv-pipe prune`: remove what killed runs have left on this machine and in a cluster.

Each part is removed by its own owner's rules: containers by their label, weights folders by the
process named in them, pods by the lease of their run, which expires if nobody renews it.
"""

import asyncio
import shutil
from collections.abc import Callable

from openenv_pipe.engines.vllm import weights_folder
from openenv_pipe.errors import HostError
from openenv_pipe.extras.containers.docker import daemon as docker_daemon

Notify = Callable[[str], None]


def prune(*, dry_run: bool, namespace: str | None, context: str | None, notify: Notify) -> None:
    """Remove the leftovers of dead runs, and report the name of each.

    dry_run: only report the names.
    namespace: where to look for pods; None: nowhere.
    context: the kubeconfig's context; None: the current one. Raises ConfigError and HostError.
    """
    found = _prune_containers(dry_run, notify) + _prune_weights(dry_run)
    if namespace is not None:
        found += asyncio.run(_prune_pods(namespace, context, dry_run))
    done = "would be removed" if dry_run else "removed"
    for name in found:
        notify(f"{done}: {name}")
    if not found:
        notify("dead runs have left nothing")


def _prune_containers(dry_run: bool, notify: Notify) -> list[str]:
    try:
        with docker_daemon.connected() as client:
            orphans = docker_daemon.orphans(client)
            for orphan in orphans:
                if not dry_run:
                    docker_daemon.remove(orphan.container)
    except HostError as error:
        notify(f"containers are not looked for: {error}")
        return []
    return [f"container {each.container.name} of process {each.owner.pid}" for each in orphans]


def _prune_weights(dry_run: bool) -> list[str]:
    folders = weights_folder.orphans(weights_folder.parent_folder(None))
    for folder in folders:
        if not dry_run:
            shutil.rmtree(folder, ignore_errors=True)
    return [f"weights in {folder}" for folder in folders]


async def _prune_pods(namespace: str, context: str | None, dry_run: bool) -> list[str]:
    from openenv_pipe.extras.containers.kubernetes.api import ClusterError, connect
    from openenv_pipe.extras.containers.kubernetes.host import dead_runs, delete_dead_runs

    cluster = await connect(namespace, context)
    try:
        names = await dead_runs(cluster)
        if not dry_run:
            await delete_dead_runs(cluster)
    except ClusterError as error:
        raise HostError(f"namespace {namespace}: the cluster rejects a call: {error}") from error
    finally:
        await cluster.close()
    return [f"pods of the run {name} in namespace {namespace}" for name in names]
