"""`serve`: serve a trained model, by vLLM with the adapter on the base, or from this process."""

import asyncio
import os
import secrets
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

from openenv_pipe.engines.vllm.client import VllmClient
from openenv_pipe.engines.vllm.endpoint import Served, running, serving_arguments
from openenv_pipe.engines.vllm.installed import (
    Build,
    Installed,
    find_build,
    find_installed,
    require_installed,
)
from openenv_pipe.engines.vllm.server_command import HOSTS_VARIABLE, KEY_VARIABLE
from openenv_pipe.engines.vllm.weights_folder import weights_folder
from openenv_pipe.errors import ConfigError, EngineError, RunFolderError
from openenv_pipe.models.chat.chat_template import ChatFormat
from openenv_pipe.models.chat.probes import TemplateProbe, probes
from openenv_pipe.models.chat.served_template import (
    TEMPLATE_FILE,
    reject_other_prompts,
    served_template,
)
from openenv_pipe.models.hub import served_source
from openenv_pipe.models.load import load_chat, load_policy, reject_vision_model, select_device
from openenv_pipe.models.replies.formats import HERMES
from openenv_pipe.models.weights import PolicyWeights
from openenv_pipe.runs.find import SelectedModel, find_model
from openenv_pipe.system.files import write_text
from openenv_pipe.system.http import LOOPBACK
from openenv_pipe.system.process import port_in_use
from openenv_pipe.system.readiness import ATTEMPT_LIMIT_S, unless_dead

START_TIMEOUT_S = 1800.0  # enough for a large model, download included


def serve_run(
    word: str,
    *,
    host: str,
    port: int,
    engine: Literal["vllm", "local"] | None,
    max_model_len: int | None,
    extra: Sequence[str],
    runs_dir: Path | None,
    notify: Callable[[str], None],
    trust: bool,
) -> None:
    """Serve what `RUN`, `RUN@40`, `RUN@best` or `RUN@start` names until interrupted.

    engine: None: the run's own, and `local` where vLLM is not installed.

    Raises RunFolderError, ConfigError and EngineError.
    """
    subject = find_model(word, runs_dir=runs_dir, trust=trust, secrets_of=["model"])
    if not subject.config.engine.capabilities.can_train:
        what = f"engine={subject.config.engine.type} trains none"
        raise RunFolderError(f"{word!r} has no model to serve: {what}; name a run that trains one")
    reject_vision_model(subject.config.model)
    title = _title(subject)
    build = find_build()
    if (engine or own_engine(subject, build, notify)) == "local":
        # Imported late, because a server of vLLM needs nothing of it.
        from openenv_pipe.extras.agents.serving.local import serve_locally

        if extra:
            raise ConfigError(
                f"{extra[0]!r} is passed to vLLM, which --engine local does not start; leave it "
                "out, or choose --engine vllm"
            )
        max_tokens = max_model_len or subject.config.max_episode_tokens
        key = server_key(host, notify)
        serve_locally(subject, title, host, port, key=key, max_tokens=max_tokens, notify=notify)
        return
    installed = require_installed(build)
    chat = load_chat(subject.config.model)
    with _served(subject, chat, max_model_len) as served:
        serving = serve(
            served,
            installed,
            title=title,
            host=host,
            port=port,
            extra=extra,
            start_timeout_s=START_TIMEOUT_S,
            log=subject.folder.path / "logs" / "serve" / "engine.log",
            notify=notify,
            check=partial(_check_prompts, chat, served),
        )
        asyncio.run(serving)


async def serve(
    served: Served,
    installed: Installed,
    *,
    title: str,
    host: str,
    port: int,
    extra: Sequence[str],
    start_timeout_s: float,
    log: Path,
    notify: Callable[[str], None],
    check: Callable[[VllmClient], Coroutine[Any, Any, None]],
) -> None:
    """Serve until cancelled.

    check: what else has to be right when the server is ready. Raises ConfigError and EngineError.
    """
    arguments = serving_arguments(served, installed.build, host, port, extra)
    key = server_key(host, notify)
    if port_in_use(port, host):
        raise ConfigError(f"--port {port} is used by another program; choose another one")
    url = f"http://{host}:{port}"
    async with running(
        served,
        installed,
        arguments,
        url=url,
        key=key,
        start_timeout_s=start_timeout_s,
        log=log,
        notify=notify,
        variables={} if host in LOOPBACK else {HOSTS_VARIABLE: "*"},  # the key alone decides
    ) as server:
        async with VllmClient(url, api_key=key, request_timeout_s=ATTEMPT_LIMIT_S) as client:
            await unless_dead(check(client), server.exited())
        notify(
            f"serving {title} as the model {served.name} at http://{host}:{port}/v1 until Ctrl-C "
            f"(log: {log})"
        )
        reason = f"the server died: {await server.exited()}"
    raise EngineError(reason, log)


def server_key(host: str, notify: Callable[[str], None]) -> str:
    """Return the key that requests have to carry: the user's, or a new one, which is printed.

    Raises ConfigError: other machines can reach the server, and the user has set no key.
    """
    if key := os.environ.get(KEY_VARIABLE, "").strip():
        return key
    if host not in LOOPBACK:
        raise ConfigError(
            f"--host {host} makes the server reachable from other machines, and {KEY_VARIABLE} is "
            "not set; set it to a secret that clients send as their API key, or use --host "
            "127.0.0.1"
        )
    key = secrets.token_urlsafe(16)
    notify(f"API key of this server, for clients: {key} (or set {KEY_VARIABLE})")
    return key


def own_engine(
    subject: SelectedModel, build: Build, notify: Callable[[str], None]
) -> Literal["vllm", "local"]:
    """Return the engine that serves a model unless the user names one."""
    if subject.config.engine.type != "vllm":
        return "local"
    if find_installed(build) is None:
        notify("vLLM is not installed here; this process samples the model (--engine local)")
        return "local"
    return "vllm"


def _title(subject: SelectedModel) -> str:
    is_before = subject.step == 0 and subject.config.trainer.steps > 0
    note = " (no GRPO step yet)" if is_before else ""
    return f"{subject.folder.record.id}@{subject.checkpoint_name}{note}"


async def _check_prompts(chat: ChatFormat, served: Served, client: VllmClient) -> None:
    """Raise ConfigError if the server gives the model other prompts than training."""
    found: dict[str, list[int] | EngineError] = {}
    for probe in probes(chat):
        try:
            found[probe.name] = await client.chat_ids(served.name, probe.messages, probe.tools)
        except EngineError as error:
            found[probe.name] = error

    def ids_of(probe: TemplateProbe) -> list[int]:
        ids = found[probe.name]
        if isinstance(ids, EngineError):
            raise ConfigError(str(ids))
        return ids

    reject_other_prompts(chat, "vLLM's server", ids_of)


@contextmanager
def _served(
    subject: SelectedModel, chat: ChatFormat, max_model_len: int | None
) -> Iterator[Served]:
    """Yield the model in vLLM's terms: a whole one, or an adapter on a base.

    A model that vLLM cannot load by its source is written to a temporary folder first.
    """
    config, model, checkpoint = subject.config, subject.config.model, subject.checkpoint
    with weights_folder(None) as scratch:
        template = scratch / TEMPLATE_FILE
        write_text(template, served_template(chat))
        revision = None
        if checkpoint is not None and not model.lora.rank:
            path = str(checkpoint)
        elif source := served_source(model):
            path, revision = source.path, source.revision
        else:
            path = str(scratch / "base")
            policy = load_policy(model, seed=config.seed, device=select_device("cpu"))
            PolicyWeights(policy).write_base(Path(path))
        yield Served(
            name=subject.folder.record.id.replace("/", "-"),
            model=path,
            revision=revision,
            adapter=checkpoint if model.lora.rank else None,
            lora_rank=model.lora.rank,
            dtype="bfloat16" if "bfloat16" in (model.dtype, model.autocast) else "float32",
            max_model_len=max_model_len or config.max_episode_tokens,
            chat_template=template,
            call_format=(chat.reply_reader.form if chat.takes_tools else HERMES).name,
        )
