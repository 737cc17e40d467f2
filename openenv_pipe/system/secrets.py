"""Secrets: recognise their names, remember their values, and remove the values from text.

A secret is the value of an environment variable, of a configuration key or of an option whose name
says so (HF_TOKEN, api_key, Authorization, --token), and the credentials in a URL. `redact` replaces
it by a mark, `<hidden: HF_TOKEN>`; whatever is written to a file, a log or a terminal passes
through it. The values of a configuration are remembered before it is validated, so that no error
can show them. Those of the environment are looked up each time.

Secrets under other names, and secrets of fewer than 8 characters inside of text, are not
recognised.
"""

import base64
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from urllib.parse import quote

SECRET_NAME = (
    r"(?:[\w-]*(?:(?:api|access|private)[-_]?key|secret|token|passw(?:or)?d|passphrase"
    r"|credentials?|authorization|cookie)"
    r"|[\w-]*-(?:key|auth|signature)"  # of headers, as X-Functions-Key
    # of environment variables
    r"|(?-i:(?:[A-Z0-9_]*_)?(?:KEY(?:_ID)?|DSN|JWT|AUTH(?:_CONFIG)?|DATABASE_URL|HEADERS"
    r"|CONNECTION_STRING|WEBHOOK(?:_URL)?)|[A-Z0-9_]*_(?:PASS|PWD|PAT)))"
)
MARK = re.compile(r"<hidden: ([^>]+)>")
MIN_SECRET_LENGTH = 8  # characters; shorter values would match by accident
URL_CREDENTIALS = re.compile(
    r"\b[a-z][a-z0-9+.-]*://(?P<credentials>(?:[^\s/?#@:'\"]*:)?(?P<secret>[^\s/?#@'\"]+))@",
    re.IGNORECASE,
)
URL_QUERY = re.compile(r"[?&](?P<name>[\w-]+)=(?P<secret>[^\s&#'\"]+)")
QUERY_NAMES = ("key", "sig", "signature")  # of a URL's query, beside the names of secrets
OPTION = re.compile(r"--?(?P<name>[\w-]+)(?:=(?P<secret>.+))?", re.DOTALL)
SCHEME = re.compile(r"(?:Bearer|Basic|Token|ApiKey)\s+(?P<secret>\S.*)", re.DOTALL | re.IGNORECASE)
COOKIE = re.compile(r"[^\s=;]+=(?P<secret>[^\s;]+)")
# How Python's HTTP libraries quote a header that they reject.
REJECTED_HEADER = re.compile(
    r"""((?:invalid|illegal) header value:? )b?(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")""",
    re.IGNORECASE,
)

_remembered: dict[str, str] = {}  # values to names


@lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """True if the name of a variable or key says that its value is a secret."""
    return re.fullmatch(SECRET_NAME, name, re.IGNORECASE) is not None


def remember_secrets(secrets: Mapping[str, str]) -> None:
    """Let `redact` hide these values, which map to their names, for the life of this process."""
    _remembered.update(secrets)


def redact(text: str) -> str:
    """Replace the known secrets in a text by marks, also where URLs quote them and in base64."""
    forms = secret_forms()
    for form in sorted(forms, key=len, reverse=True):  # One may contain another.
        text = text.replace(form, forms[form])
    return REJECTED_HEADER.sub(r"\1<hidden>", text)


def secret_forms() -> dict[str, str]:
    """Map the texts that `redact` replaces to their marks."""
    secrets = _remembered | environment_secrets()
    return {form: f"<hidden: {secrets[value]}>" for value in secrets for form in _forms(value)}


def environment_secrets() -> dict[str, str]:
    """Map values to names of the secrets in the environment."""
    return named_secrets(
        (name, text) for name, text in os.environ.items() if is_secret_name(name) or "://" in text
    )


def named_secrets(named: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Map values to names of the secrets in named texts, the parts of headers and URLs included."""
    found: dict[str, str] = {}
    before = ""
    for name, text in named:
        for secret_name, value in _secrets_of(name, text, before):
            if len(value) >= MIN_SECRET_LENGTH and not MARK.search(value):
                found.setdefault(value, secret_name)
        before = text
    return found


def url_secrets(text: str) -> Iterator[tuple[str, str]]:
    """Yield names and values of the secrets in the URLs of a text."""
    for match in URL_CREDENTIALS.finditer(text):
        yield "url_credentials", match["credentials"]
        yield "url_password", match["secret"]
    for match in URL_QUERY.finditer(text):
        if is_secret_name(match["name"]) or match["name"] in QUERY_NAMES:
            yield match["name"], match["secret"]


def _secrets_of(name: str, text: str, before: str) -> Iterator[tuple[str, str]]:
    """Yield names and values of the secrets in one text; `before` is the text in front of it."""
    if is_secret_name(name):
        yield name, text
        if scheme := SCHEME.fullmatch(text):
            yield name, scheme["secret"]
            yield name, _password(scheme["secret"])
        if name.lower().endswith("cookie"):
            for cookie in COOKIE.finditer(text):
                yield name, cookie["secret"]
        return
    if "://" in text:
        for kind, value in url_secrets(text):
            yield f"{name}_{kind}", value
    if (option := OPTION.fullmatch(text)) and option["secret"] and is_secret_name(option["name"]):
        yield option["name"], option["secret"]
    elif (option := OPTION.fullmatch(before)) and is_secret_name(option["name"]):
        yield option["name"], text


def _password(basic: str) -> str:
    """Return the password in the credentials of HTTP's basic authentication; empty without one."""
    try:
        return base64.b64decode(basic, validate=True).decode().partition(":")[2]
    except ValueError:
        return ""


@lru_cache(maxsize=256)
def _forms(value: str) -> frozenset[str]:
    """Return a secret as it is, URL-quoted and in base64, with and without outer whitespace."""
    forms: set[str] = set()
    for text in {value, value.strip()}:
        data = text.encode(errors="surrogatepass")
        forms |= {text, quote(data, safe=""), base64.b64encode(data).decode()}
    return frozenset(form for form in forms if len(form) >= MIN_SECRET_LENGTH)


# A folder for the server's PYTHONPATH. Nothing in it imports this package.
SERVER_SIDE = Path(__file__).with_name("server_side")
ENV_KEY, ENV_PORT = "OPENENV_PIPE_KEY", "OPENENV_PIPE_PORT"  # variables of an environment's server


def new_key(whose: str) -> str:
    """Return a random key, which logs and errors do not show. whose: such as "a vLLM server"."""
    key = secrets.token_urlsafe(32)
    remember_secrets({key: f"the key of {whose}"})
    return key
