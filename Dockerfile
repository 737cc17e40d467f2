# Build:  docker build -t openenv-pipe .
# Run:    docker run --rm --user "$(id -u):$(id -g)" -v "$PWD:/work" openenv-pipe train conf=smoke
# torch is the build for CUDA, which also runs on CPUs. A smaller image for CPUs alone:
#         --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG BASE=python:3.12-slim
FROM ${BASE}

ARG TORCH_INDEX=
# Optional parts, in brackets: [envs,datasets,wandb]. Shipped experiments such as conf=sums need envs.
ARG EXTRAS=[envs]

# A C compiler, for a package of the extra envs, and because torch compiles kernels when it trains on a GPU.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && \
    rm -rf /var/lib/apt/lists/*
# In an environment of its own, because Debian's Python lets pip install nothing beside it.
RUN python3 -m venv /opt/openenv-pipe
ENV PATH=/opt/openenv-pipe/bin:$PATH \
    PYTHONUNBUFFERED=1
COPY . /source
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "/source${EXTRAS}" && rm -rf /source

# With --user the process has no name and no home of its own: these serve every user.
RUN useradd --create-home --uid 1000 pipe && install -d -o pipe -m 777 /work && chmod 777 /home/pipe
ENV HOME=/home/pipe USER=pipe
USER pipe
WORKDIR /work

ENTRYPOINT ["openenv-pipe"]
CMD ["--help"]
