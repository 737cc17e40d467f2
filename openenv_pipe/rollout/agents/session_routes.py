"""The addresses of an episode's session: plain HTTP, OpenEnv's WebSocket, and an MCP server.

POST  /openenv/KEY/reset, step;  GET state    as an environment's HTTP server
WS    /openenv/KEY/ws                         for OpenEnv's own clients
POST  /openenv/KEY/mcp                        tools of the environment, for MCP clients
"""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from openenv_pipe.environments.client.protocol import StepResult
from openenv_pipe.rollout.agents.steps import EnvironmentSteps, RefusedStepError
from openenv_pipe.system.foreign_json import parse_foreign
from openenv_pipe.system.tasks import awaited

MCP_VERSION = "2025-06-18"  # if a client names none
INVALID_REQUEST, NO_METHOD = -32600, -32601  # codes of JSON-RPC
UNKNOWN_KEY = "unknown key"


class SessionRoutes:
    """Handles the requests of all programs. `find` returns the steps of the episode with a key."""

    def __init__(self, find: Callable[[str], EnvironmentSteps | None]) -> None:
        self._find = find
        self.routes = [
            WebSocketRoute("/openenv/{key}/ws", self._websocket),
            Route("/openenv/{key}/mcp", self._mcp, methods=["POST"]),
            Route("/openenv/{key}/{name}", self._http, methods=["GET", "POST"]),
        ]

    async def _http(self, request: Request) -> Response:
        steps = self._find(request.path_params["key"])
        if steps is None:
            return error_response(401, UNKNOWN_KEY)
        name = request.path_params["name"]
        if name == "health":
            return JSONResponse({"status": "healthy"})
        try:
            body = parse_foreign(await request.body() or b"{}")
            data = body.get("action") if name == "step" and isinstance(body, dict) else None
            return JSONResponse(await _answer(steps, name, data))
        except (RefusedStepError, ValueError) as error:
            return error_response(422, str(error))

    async def _websocket(self, socket: WebSocket) -> None:
        """Answer OpenEnv's frames. Closing the socket ends nothing: the session is the run's."""
        await socket.accept()
        steps = self._find(socket.path_params["key"])
        with suppress(WebSocketDisconnect):
            while (answer := await self._answer_frame(steps, await socket.receive_text())) != {}:
                await socket.send_text(json.dumps(answer))
            await socket.close()

    async def _answer_frame(self, steps: EnvironmentSteps | None, text: str) -> dict[str, Any]:
        """Return the frame that answers a frame; an empty one to close the socket."""
        if steps is None:
            return _error_frame("SESSION_ERROR", UNKNOWN_KEY)
        try:
            frame = parse_foreign(text)
            kind = frame.get("type") if isinstance(frame, dict) else None
            if kind == "close":
                return {}
            data = await _answer(steps, str(kind), frame.get("data") if kind else None)
            return {"type": "state" if kind == "state" else "observation", "data": data}
        except RefusedStepError as error:
            return _error_frame("EXECUTION_ERROR", str(error))
        except ValueError as error:
            return _error_frame("VALIDATION_ERROR", str(error))

    async def _mcp(self, request: Request) -> Response:
        """Answer one message of JSON-RPC, as an MCP server without sessions and streams does."""
        steps = self._find(request.path_params["key"])
        if steps is None:
            return error_response(401, UNKNOWN_KEY)
        message = parse_foreign(await request.body())
        if not isinstance(message, dict) or not isinstance(message.get("method"), str):
            return error_response(400, "expected a message of JSON-RPC")
        if "id" not in message:  # a notification
            return Response(status_code=202)
        parameters = message.get("params")
        parameters = parameters if isinstance(parameters, dict) else {}
        answer: dict[str, Any] = {"jsonrpc": "2.0", "id": message["id"]}
        match message["method"]:
            case "initialize":
                answer["result"] = {
                    "protocolVersion": parameters.get("protocolVersion", MCP_VERSION),
                    "capabilities": {"tools": {}},
                    "serverInfo": {"name": "openenv-pipe", "version": "1"},
                }
            case "ping":
                answer["result"] = {}
            case "tools/list":
                answer["result"] = {"tools": _mcp_tools(steps)}
            case "tools/call":
                answer["result"] = await _call_tool(steps, parameters)
            case method:
                error = {"code": NO_METHOD, "message": f"there is no method {method!r:.40}"}
                answer["error"] = error
        return JSONResponse(answer)


def error_response(status: int, message: str) -> JSONResponse:
    """Return an error in the form of OpenAI's interface."""
    error = {"message": message, "type": "invalid_request_error"}
    return JSONResponse({"error": error}, status_code=status)


async def _answer(steps: EnvironmentSteps, kind: str, data: Any) -> dict[str, Any]:
    """Answer `reset`, `step` or `state`. Raises RefusedStepError and ValueError."""
    match kind:
        case "reset":  # The run has reset the session, with the task.
            return _result(steps.first)
        case "state":
            return await steps.state()
        case "step":
            if not isinstance(data, dict):
                raise ValueError("a step needs an action, which is a JSON object")
            return _result(await steps.step(data))
    raise ValueError(f"there is no {kind!r:.40}; expected reset, step or state")


def _result(result: StepResult) -> dict[str, Any]:
    return {"observation": result.observation, "reward": result.reward, "done": result.done}


def _error_frame(code: str, message: str) -> dict[str, Any]:
    return {"type": "error", "data": {"code": code, "message": message}}


def _mcp_tools(steps: EnvironmentSteps) -> list[dict[str, Any]]:
    """Return the environment's tools; of another environment one tool, whose call is a step."""
    functions = [tool["function"] for tool in steps.opening.tools]
    if not functions:
        schema = steps.opening.action_schema or {"type": "object"}
        functions = [{"name": "step", "description": "Take a step.", "parameters": schema}]
    return [
        {
            "name": function["name"],
            "description": function.get("description", ""),
            "inputSchema": {"type": "object", **function.get("parameters", {})},
        }
        for function in functions
    ]


async def _call_tool(steps: EnvironmentSteps, parameters: Mapping[str, Any]) -> dict[str, Any]:
    arguments = parameters.get("arguments") or {}
    action = arguments
    if steps.opening.tools:
        name = parameters.get("name")
        action = {"type": "call_tool", "tool_name": name, "arguments": arguments}
    try:
        result = await steps.step(action)
    except RefusedStepError as error:
        return {"content": [{"type": "text", "text": str(error)}], "isError": True}
    messages = await awaited(steps.adapter.follow(result.observation))
    texts = [message["content"] for message in messages]
    if result.done:
        texts.append("The episode is over.")
    return {"content": [{"type": "text", "text": "\n".join(texts)}], "isError": False}
