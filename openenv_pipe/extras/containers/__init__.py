"""Environment servers, programs and vLLM servers in containers, by Docker or Kubernetes."""

from openenv_pipe.registry import BlockType, Command, Extra

EXTRA = Extra(
    name="containers",
    commands=(Command(name="prune", target="openenv_pipe.extras.containers.cli:prune"),),
    blocks=(
        BlockType(
            block="host",
            type="docker",
            config="openenv_pipe.extras.containers.schema:DockerHostConfig",
            build="openenv_pipe.extras.containers.docker.host:DockerHost",
        ),
        BlockType(
            block="host",
            type="kubernetes",
            config="openenv_pipe.extras.containers.schema:KubernetesHostConfig",
            build="openenv_pipe.extras.containers.kubernetes:build_kubernetes_host",
        ),
        BlockType(
            block="agent.sandbox",
            type="docker",
            config="openenv_pipe.extras.containers.schema:DockerSandboxConfig",
            build="openenv_pipe.extras.containers.docker.sandbox:containers_of_programs",
            check="openenv_pipe.extras.containers.docker.sandbox:check_sandbox",
        ),
        BlockType(
            block="engine.launch",
            type="docker",
            config="",
            build="openenv_pipe.extras.containers.docker.vllm_server:VllmContainer",
            check="openenv_pipe.extras.containers.docker.vllm_server:check_launch",
        ),
    ),
    prepare="openenv_pipe.extras.containers.preparation:prepare",
)
