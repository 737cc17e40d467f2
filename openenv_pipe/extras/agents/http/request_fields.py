"""What the fields of a request for a completion do here, by dialect.

Some act, some change no answer, and some ask for what this server does not have, so that an answer
would be wrong. All others have no effect and are noted in the episode: a field that a new version
of a client sends is therefore never dropped in silence.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from openenv_pipe.extras.agents.http.capture import APIType
from openenv_pipe.system.resources import did_you_mean

# The key of a translated request for the fields without effect: their own names and values.
IGNORED = "openenv_pipe_ignored"

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty")
_ACCOUNTING = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "moderation"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "cache_control"),
)
# Fields that act, or that `ignored_settings` notes: those of sampling and of the reply's form.
ACTS: Mapping[APIType, frozenset[str]] = {
    APIType.OPENAI_CHAT: frozenset(
        (
            *("model", "messages", "tools", "tool_choice", "max_tokens", "max_completion_tokens"),
            *("stream", "stream_options", "logprobs", "n"),
            *(*_SAMPLING, "repetition_penalty", "logit_bias", "stop", "min_tokens"),
            "response_format",
        )
    ),
    APIType.OPENAI_RESPONSES: frozenset(
        (
            *("model", "input", "instructions", "tools", "tool_choice", "max_output_tokens"),
            *("max_tokens", "stream", "stream_options", "temperature", "top_p", "text"),
        )
    ),
    APIType.ANTHROPIC: frozenset(
        (
            *("model", "messages", "system", "tools", "tool_choice", "max_tokens", "stream"),
            *("temperature", "top_p", "top_k", "stop_sequences"),
        )
    ),
    APIType.GOOGLE: frozenset(
        (
            *("model", "contents", "systemInstruction", "system_instruction", "tools"),
            *("toolConfig", "generationConfig", "config", "maxOutputTokens", "temperature"),
            *("topP", "topK", "stopSequences", "candidateCount", "presencePenalty"),
            *("frequencyPenalty", "responseMimeType", "responseSchema", "responseFormat"),
            "responseJsonSchema",
        )
    ),
}
# The field that has the conversation.
CONVERSATION: Mapping[APIType, str] = {
    APIType.OPENAI_CHAT: "messages",
    APIType.OPENAI_RESPONSES: "input",
    APIType.ANTHROPIC: "messages",
    APIType.GOOGLE: "contents",
}
MAX_SHOWN = 3  # unknown fields in an error
# Fields that change no answer of this server.
HARMLESS: Mapping[APIType, frozenset[str]] = {
    APIType.OPENAI_CHAT: frozenset((*_ACCOUNTING, "prediction")),
    APIType.OPENAI_RESPONSES: frozenset((*_ACCOUNTING, "include", "access_programs")),
    APIType.ANTHROPIC: frozenset(
        (
            *(*_ACCOUNTING, "diagnostics", "inference_geo", "speed", "user_profile_id"),
            "workspace_id",
        )
    ),
    APIType.GOOGLE: frozenset(("safetySettings", "labels")),
}
# Fields that name what only the provider's own server has, or an interface that is not served.
REJECTED: Mapping[APIType, Mapping[str, str]] = {
    APIType.OPENAI_CHAT: {
        "functions": "send tools instead",
        "function_call": "send tool_choice instead",
        "audio": "the model writes text",
    },
    APIType.OPENAI_RESPONSES: {
        "previous_response_id": "no answer is stored; send the whole conversation as input",
        "conversation": "no conversation is stored; send the whole of it as input",
        "prompt": "no prompt is stored; send its text",
        "background": "answers are not stored",
        "image": "the model writes text",
    },
    APIType.ANTHROPIC: {"container": "there are no containers"},
    APIType.GOOGLE: {"cachedContent": "no content is stored; send the whole of it"},
}
# Values with which a field without effect asks for nothing.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "parallel_tool_calls": (True,),
    "modalities": (["text"],),
    "truncation": ("disabled",),
    "thinking": ({"type": "disabled"},),
    "top_logprobs": (0,),
}


def find_ignored(dialect: APIType, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request that have no effect, with their values. Raises ValueError."""
    ignored = {}
    for name, value in _fields(dialect, body):
        asks_nothing = value is None or value is False or value in ([], {}, "")
        if asks_nothing or name in ACTS[dialect] or name in HARMLESS[dialect]:
            continue
        if (advice := REJECTED[dialect].get(name)) is not None:
            raise ValueError(f"{name} is not supported: {advice}")
        if value not in NEUTRAL.get(name, ()):
            ignored[name] = value
    tools = body.get("tools")
    kinds = [_kind_of(dialect, tool) for tool in tools] if isinstance(tools, list) else []
    if left_out := [kind for kind in kinds if kind != "function"]:
        ignored["tools of type"] = ", ".join(dict.fromkeys(left_out))
    return ignored


def require_conversation(dialect: APIType, body: Mapping[str, Any]) -> None:
    """Raise ValueError for a request without a conversation; the error names unknown fields."""
    wanted = CONVERSATION[dialect]
    if body.keys() & {wanted, "instructions"}:
        return
    known = ACTS[dialect] | HARMLESS[dialect]
    unknown = [name for name in body if name not in known][:MAX_SHOWN]
    hints = [f"{name!r:.80} is unknown{did_you_mean(name, [wanted])}" for name in unknown]
    raise ValueError("; ".join([f"{wanted} is missing", *hints]))


def _fields(dialect: APIType, body: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a request, in Google's dialect also those of its configuration."""
    for name, value in body.items():
        yield name, value
        if dialect is APIType.GOOGLE and name in ("generationConfig", "config"):
            yield from _fields(dialect, value if isinstance(value, dict) else {})


def _kind_of(dialect: APIType, tool: Any) -> str:
    """Return `function` for a tool that the model is shown, else what it is."""
    if not isinstance(tool, dict):
        return type(tool).__name__
    kind = str(tool.get("type", "function"))
    match dialect:
        case APIType.GOOGLE:
            others = [name for name in tool if name != "functionDeclarations"]
            return others[0] if others else "function"
        case APIType.ANTHROPIC:
            return "function" if kind == "custom" else kind
        case APIType.OPENAI_RESPONSES:
            return "function" if kind == "namespace" else kind
    return kind
