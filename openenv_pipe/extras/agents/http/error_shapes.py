"""Errors as the clients of each dialect read them, by the path of a request."""

from typing import Any

from starlette.responses import JSONResponse

# Codes of JSON-RPC.
PARSE_ERROR, INVALID_REQUEST, NO_METHOD, INVALID_PARAMETERS = -32700, -32600, -32601, -32602
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
_GOOGLE_STATUSES = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    429: "RESOURCE_EXHAUSTED",
}
FIRST_FAULT = 500  # of the status codes that are the server's fault


def error_response(status: int, message: str, path: str = "") -> JSONResponse:
    """Return an error in the form of the dialect that a path belongs to, by default OpenAI's."""
    is_fault = status >= FIRST_FAULT
    kind = "api_error" if is_fault else "invalid_request_error"
    body: dict[str, Any]
    lowered = path.lower()
    if lowered.endswith(("/messages", "/messages/count_tokens")):
        kind = _ANTHROPIC_TYPES.get(status, kind)
        body = {"type": "error", "error": {"type": kind, "message": message}}
    elif lowered.endswith(("generatecontent", ":counttokens")):
        name = _GOOGLE_STATUSES.get(status, "INTERNAL" if is_fault else "INVALID_ARGUMENT")
        body = {"error": {"code": status, "message": message, "status": name}}
    elif lowered.endswith("/mcp"):
        body = rpc_error(None, PARSE_ERROR if status == 400 else INVALID_REQUEST, message)
    else:
        body = {"error": {"message": message, "type": kind, "param": None, "code": None}}
    return JSONResponse(body, status_code=status)


def rpc_error(number: Any, code: int, message: str) -> dict[str, Any]:
    """Return an error of JSON-RPC. number: of the message that it answers."""
    return {"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": message}}
