"""The environment variables that third-party programs get: an allowlist.

Environment servers, agents' programs, vLLM servers, installers, git and `docker` start with the
variables below that this process has, and with those that the configuration names. Everything else
stays here, because no list of names can know every credential: DATABASE_URL, a DSN, a proxy's
password. Processes that run this package's own code inherit all variables.
"""

import os
import re
from collections.abc import Mapping, Sequence

from openenv_pipe.errors import ConfigError
from openenv_pipe.system.secrets import is_secret_name, remember_secrets, url_secrets

# A name that ends with `*` stands for all names with that beginning.
PROCESS = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "HOSTNAME", "TERM", "COLORTERM", "NO_COLOR"),
    *("COLUMNS", "LINES", "LANG", "LANGUAGE", "LC_*", "LOCPATH", "LOCALE_ARCHIVE", "TZ", "TZDIR"),
    *("TMPDIR", "TMP", "TEMP", "XDG_*", "__CF_USER_TEXT_ENCODING"),
)
PYTHON = (
    *("PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "PYTHONNOUSERSITE", "PYTHONSAFEPATH"),
    *("PYTHONHASHSEED", "PYTHONUTF8", "PYTHONIOENCODING", "PYTHONOPTIMIZE", "PYTHONWARNINGS"),
    *("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTHONMALLOC"),
    *("PYTHONFAULTHANDLER", "PYTHONDEVMODE", "PYTHONASYNCIODEBUG", "PYTHONTRACEMALLOC"),
    *("VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV"),
)
LIBRARIES = (
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "DYLD_LIBRARY_PATH", "MALLOC_*", "GLIBC_TUNABLES"),
    *("OMP_*", "KMP_*", "GOMP_*", "MKL_*", "OPENBLAS_*", "VECLIB_*", "NUMEXPR_*", "NUMBA_*"),
    *("RAYON_NUM_THREADS", "TOKENIZERS_PARALLELISM", "CUDA_*", "NVIDIA_*", "NCCL_*", "GLOO_*"),
    *("VLLM_*", "HIP_*", "ROCR_*", "HSA_*", "TORCH_*", "PYTORCH_*", "TORCHINDUCTOR_*", "TRITON_*"),
    *("MUJOCO_GL", "PYOPENGL_PLATFORM", "SDL_VIDEODRIVER", "SDL_AUDIODRIVER", "MPLBACKEND"),
)
PROXIES = (
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "FTP_PROXY"),
    *("http_proxy", "https_proxy", "all_proxy", "ftp_proxy"),
)
NETWORK = (
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    *("NODE_EXTRA_CA_CERTS", "GIT_SSL_CAINFO", "PIP_CERT"),
    *("NO_PROXY", "no_proxy", *PROXIES),
)
HUB = (
    *("HF_HOME", "HF_HUB_*", "HF_ENDPOINT", "HF_DATASETS_CACHE", "HF_DATASETS_OFFLINE"),
    *("HF_ASSETS_CACHE", "HF_XET_*", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE"),
    *("TRANSFORMERS_OFFLINE", "TRANSFORMERS_VERBOSITY", "DO_NOT_TRACK"),
)
# Of the `docker` command, which pulls with the user's logins and through the user's proxies.
DOCKER = ("DOCKER_*", "BUILDKIT_*", "BUILDX_*", "SSH_AUTH_SOCK", *PROXIES)
SHARED = (*PROCESS, *PYTHON, *LIBRARIES, *NETWORK, *HUB)
# Of these variables, those with the name of a secret or with such a value are not passed: user
# information or a key in a URL (a proxy's may lack the scheme), or a JSON Web Token.
CREDENTIALS = re.compile(r"://\S*@|eyJ[\w-]{5,}\.eyJ[\w-]{5,}\.")


def child_environment(*more: str, without: Sequence[str] = ()) -> dict[str, str]:
    """Return the variables of this process that a third-party program may have.

    Both arguments are names, or beginnings of names that end with `*`.

    more: the program's own variables, which it gets even if they contain credentials.
    without: what would mislead it.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if not _matches(name, without)
        and (_matches(name, more) or (_matches(name, SHARED) and not _is_secret(name, value)))
    }


def _matches(name: str, patterns: Sequence[str]) -> bool:
    beginnings = tuple(each[:-1] for each in patterns if each.endswith("*"))
    return name in patterns or name.startswith(beginnings)


def _is_secret(name: str, value: str) -> bool:
    has_credentials = CREDENTIALS.search(value) is not None or (name in PROXIES and "@" in value)
    return is_secret_name(name) or has_credentials or any(url_secrets(value))


def given_variables(variables: Mapping[str, str | None], key: str) -> dict[str, str]:
    """Return the variables of a configuration; null is the value that this process has.

    key: of `variables`, for messages.

    Raises ConfigError: this process has no such variable.
    """
    missing = [
        name for name, value in variables.items() if value is None and name not in os.environ
    ]
    if missing:
        raise ConfigError(
            f"{key}.{missing[0]} is null, which passes on the environment variable {missing[0]}, "
            "and that is not set; set it, or remove the key"
        )
    return {name: os.environ[name] if value is None else value for name, value in variables.items()}


def inherited_variables(variables: Mapping[str, str | None]) -> dict[str, str]:
    """Return the variables that a configuration passes on, as far as this process has them."""
    return {
        name: os.environ[name]
        for name, value in variables.items()
        if value is None and name in os.environ
    }


def adopt_variables(variables: Mapping[str, str]) -> None:
    """Set variables that another machine has sent to this process, and let no log show them."""
    os.environ.update(variables)
    remember_secrets({value: name for name, value in variables.items()})


def names_left_out(environment: Mapping[str, str], output: str, key: str | None) -> str:
    """Return a note that names the variables that a process mentions but did not get.

    output: the end of what the process has written.
    key: the configuration key that passes on more of them, if there is one.
    """
    words = set(re.findall(r"\w{2,}", output))
    names = sorted(words & {*os.environ} - {*environment})
    if not names:
        return ""
    note = f"these environment variables were not passed to it: {', '.join(names)}"
    return f"{note}; {key}={{{names[0]}: null}} would pass one on" if key else note
