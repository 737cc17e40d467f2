"""The addresses of an episode's session: plain HTTP, OpenEnv's WebSocket, and an MCP server.

POST  /openenv/KEY/reset, step;  GET state    as an environment's HTTP server
WS    /openenv/KEY/ws                         for OpenEnv's own clients
POST  /openenv/KEY/mcp                        tools of the environment, for MCP clients

The gateway admits nobody without the key of an episode that is played.
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from openenv_pipe.environments.client.protocol import StepResult
from openenv_pipe.extras.agents.http.gate import (
    INVALID_PARAMETERS,
    INVALID_REQUEST,
    NO_METHOD,
    PARSED,
    error_response,
    rpc_error,
)
from openenv_pipe.extras.agents.steps import EnvironmentSteps, RejectedStepError
from openenv_pipe.system.tasks import awaited
from openenv_pipe.system.untrusted_json import parse_request

MCP_VERSION = "2025-06-18"  # if a client names none


class SessionRoutes:
    """Handles the requests of all programs. `find` returns the steps of the episode with a key."""

    def __init__(self, find: Callable[[str], EnvironmentSteps]) -> None:
        self._find = find
        self.routes = [
            WebSocketRoute("/openenv/{key}/ws", self._websocket),
            Route("/openenv/{key}/mcp", self._mcp, methods=["POST"]),
            Route("/openenv/{key}/{name}", self._http, methods=["GET", "POST"]),
        ]

    async def _http(self, request: Request) -> Response:
        steps = self._find(request.path_params["key"])
        name = request.path_params["name"]
        if name == "health":
            return JSONResponse({"status": "healthy"})
        try:
            body = request.scope[PARSED]
            data = body.get("action") if name == "step" and isinstance(body, dict) else None
            return JSONResponse(await _answer(steps, name, data))
        except (RejectedStepError, ValueError) as error:
            return error_response(422, str(error))

    async def _websocket(self, socket: WebSocket) -> None:
        """Answer OpenEnv's frames until the client or the episode ends.

        Closing the socket ends nothing: the session is the run's.
        """
        steps = self._find(socket.path_params["key"])
        await socket.accept()
        ended = asyncio.create_task(steps.has_ended.wait())
        try:
            while True:
                receiving = asyncio.create_task(socket.receive())
                await asyncio.wait({receiving, ended}, return_when=asyncio.FIRST_COMPLETED)
                if not receiving.done():
                    receiving.cancel()
                    break
                message = receiving.result()
                if message["type"] == "websocket.disconnect":
                    return
                answer = await _answer_frame(steps, message.get("text"))
                if answer == {}:
                    break
                await socket.send_text(json.dumps(answer))
            await socket.close()
        except WebSocketDisconnect:
            return
        finally:
            ended.cancel()

    async def _mcp(self, request: Request) -> Response:
        """Answer one message of JSON-RPC, as an MCP server without sessions and streams does."""
        steps = self._find(request.path_params["key"])
        message = request.scope[PARSED]
        if not isinstance(message, dict) or not isinstance(message.get("method"), str):
            text = "expected one message of JSON-RPC, an object with a method"
            return JSONResponse(rpc_error(None, INVALID_REQUEST, text), status_code=400)
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
                try:
                    answer["result"] = await _call_tool(steps, parameters)
                except ValueError as error:
                    answer = rpc_error(message["id"], INVALID_PARAMETERS, str(error))
            case method:
                text = f"there is no method {method!r:.40}"
                answer = rpc_error(message["id"], NO_METHOD, text)
        return JSONResponse(answer)


async def _answer_frame(steps: EnvironmentSteps, text: str | None) -> dict[str, Any]:
    """Return the frame that answers a frame; an empty one to close the socket.

    text: None for a binary frame.
    """
    try:
        if text is None:
            raise ValueError("expected a text frame with JSON")
        frame = await asyncio.to_thread(parse_request, text)
        kind = frame.get("type") if isinstance(frame, dict) else None
        if kind == "close":
            return {}
        data = await _answer(steps, str(kind), frame.get("data") if kind else None)
        return {"type": "state" if kind == "state" else "observation", "data": data}
    except RejectedStepError as error:
        return _error_frame("EXECUTION_ERROR", str(error))
    except ValueError as error:
        return _error_frame("VALIDATION_ERROR", str(error))


async def _answer(steps: EnvironmentSteps, kind: str, data: Any) -> dict[str, Any]:
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
    """Return the environment's tools; if it has none, one tool, whose call is a step."""
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
    name, arguments = parameters.get("name"), parameters.get("arguments") or {}
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError(
            f"expected the name of a tool and an object of arguments, got {name!r:.40} and "
            f"{arguments!r:.40}"
        )
    action = arguments
    if steps.opening.tools:
        action = {"type": "call_tool", "tool_name": name, "arguments": arguments}
    try:
        result = await steps.step(action)
    except RejectedStepError as error:
        return {"content": [{"type": "text", "text": str(error)}], "isError": True}
    messages = await awaited(steps.adapter.follow(result.observation))
    texts = [message["content"] for message in messages]
    if result.done:
        texts.append("The episode is over.")
    return {"content": [{"type": "text", "text": "\n".join(texts)}], "isError": False}
