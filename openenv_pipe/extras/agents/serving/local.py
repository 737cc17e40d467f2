"""`serve --engine local`: serve a run's trained model from this process, without vLLM."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from openenv_pipe.engines.eager import EagerEngine
from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.agents.http.chat_completions import read_request
from openenv_pipe.extras.agents.serving.served_model import ModelEndpoint, ServedModel
from openenv_pipe.learner.seeding import prepare_thread
from openenv_pipe.models.chat.probes import TemplateProbe
from openenv_pipe.models.chat.served_template import reject_other_prompts
from openenv_pipe.models.load import load_policy, select_device
from openenv_pipe.runs.find import SelectedModel
from openenv_pipe.system.process import usable_cores

MAX_BATCH = 32  # requests sampled at once


def serve_locally(
    subject: SelectedModel,
    title: str,
    host: str,
    port: int,
    *,
    key: str,
    max_tokens: int,
    notify: Callable[[str], None],
) -> None:
    """Serve a checkpoint by the local engine until interrupted.

    notify: receives the address, and what requests ask for and do not get. Raises ConfigError.
    """
    config = subject.config
    policy = load_policy(
        config.model,
        seed=config.seed,
        device=select_device(config.device),
        checkpoint=subject.checkpoint,
        max_tokens=max_tokens,
    )
    if policy.max_length is not None and max_tokens > policy.max_length:
        raise ConfigError(
            f"the model has {policy.max_length} positions, and the server would allow {max_tokens} "
            f"tokens; set --max-model-len {policy.max_length} or less"
        )
    name = subject.folder.record.id.replace("/", "-")
    prepare = partial(prepare_thread, config.num_threads or len(usable_cores()))

    async def serve() -> None:
        with ThreadPoolExecutor(1, "sampler", prepare) as executor:
            engine = EagerEngine(policy, max_episodes=MAX_BATCH, executor=executor)
            model = ServedModel(
                engine, policy.chat, name=name, max_tokens=max_tokens, notify=notify
            )
            reject_other_prompts(policy.chat, "this server", partial(_prompt_ids, model))
            try:
                endpoint = ModelEndpoint(model, host=host, port=port, key=key)
            except OSError as error:
                raise ConfigError(f"--host {host} --port {port} cannot be used: {error}") from None
            async with endpoint.serving():
                where = f"http://{host}:{port}/v1"
                notify(f"serving {title} as the model {name} at {where} until Ctrl-C")
                await asyncio.Event().wait()

    asyncio.run(serve())


def _prompt_ids(model: ServedModel, probe: TemplateProbe) -> list[int]:
    body = {"messages": [*probe.messages], "tools": [*probe.tools]}
    return model.prompt_ids(read_request(body))
