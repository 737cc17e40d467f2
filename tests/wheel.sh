#!/usr/bin/env bash
# Tries a wheel as a user gets it: in empty environments and an empty home, outside the checkout.
# The lowest versions are those of pyproject.toml, of all direct dependencies but torch, whose oldest
# build for CPUs is not on every index. The newest are also tried by `uv tool install` and uvx.
# uv's own variables, such as UV_EXTRA_INDEX_URL, say where packages come from.
set -euo pipefail
if [[ $# != 3 || ! -f $1 || ! $3 =~ ^(newest|lowest)$ ]]; then
    echo "usage: tests/wheel.sh WHEEL PYTHON newest|lowest" >&2
    exit 2
fi
wheel=$(realpath "$1") python=$2 versions=$3
project=$(realpath "$(dirname "$0")/..")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"

echo "==> installing $(basename "$wheel") with the $versions versions for Python $python"
uv venv --quiet --python "$python" env
export VIRTUAL_ENV=$folder/env
if [[ $versions == lowest ]]; then
    echo "torch ; python_version < '3'" >no-torch.txt
    uv pip install --quiet --resolution lowest-direct --override no-torch.txt \
        -r "$project/pyproject.toml" --extra sweeps --extra envs
fi
uv pip install --quiet "$wheel[sweeps,envs]"

mkdir home work
cd work
try() {
    echo "==> openenv-pipe $*"
    HOME=$folder/home "$folder/env/bin/openenv-pipe" "$@" </dev/null >log 2>&1 || { cat log; exit 1; }
    tail -n 1 log
}
try --version
try train conf=smoke
try train conf=sums trainer.steps=2 trainer.tasks_per_step=4 trainer.group_size=4 eval.num_tasks=4
try view --bundle bundle runs/smoke/0001
try train -m conf=smoke seed=0,1 name=swept
try reproduce runs/smoke/0001
[[ $versions == newest ]] || exit 0

echo "==> uv tool install, uvx"
export UV_TOOL_DIR=$folder/tools UV_TOOL_BIN_DIR=$folder/bin
uv tool install --quiet --python "$python" "$wheel"
"$folder/bin/openenv-pipe" --version
uvx --quiet --python "$python" --from "$wheel" openenv-pipe --version
