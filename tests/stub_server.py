"""Small environment servers with the minimum of the protocol, which start quickly.

Each is a program for `env.command`, made of the code that answers a message.
"""

import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

SOURCE = """
import asyncio, json, os, sys
from http import HTTPStatus
from websockets.asyncio.server import serve

limit, num_sessions = int(os.environ.get("MAX_CONCURRENT_ENVS", "64")), 0

def health(connection, request):
    if request.path == "/health":
        return connection.respond(HTTPStatus.OK, "fine")

async def play(connection):
    global num_sessions
    if num_sessions >= limit:
        data = {"code": "CAPACITY_REACHED", "message": f"{limit} of {limit} in use"}
        return await connection.send(json.dumps({"type": "error", "data": data}))
    num_sessions += 1
    session = {"number": 0, "seed": 0}
    try:
        async for text in connection:
            message = json.loads(text)
            kind, data = "state", {}
            if message["type"] != "state":
                session["number"] = 0 if message["type"] == "reset" else session["number"] + 1
                session["seed"] = message.get("data", {}).get("seed", session["seed"])
                kind, data = "observation", await answer(message.get("data", {}), **session)
            await connection.send(json.dumps({"type": kind, "data": data}))
    finally:
        num_sessions -= 1

async def main():
    async with serve(play, sys.argv[1], int(sys.argv[2]), process_request=health) as server:
        await server.serve_forever()
"""


def stub_command(code: str, *arguments: str) -> list[str]:
    """Return the command of a server, which finds `arguments` in sys.argv from 3 on.

    code: defines `async def answer(data, number, seed)`, which returns the data of an observation.
        data: that of the message; number: of the episode's step, 0 for its reset
    """
    source = f"{SOURCE}{code}\nasyncio.run(main())\n"
    return [sys.executable, "-c", source, "127.0.0.1", "{port}", *arguments]


def write_stub_block(folder: Path, name: str, code: str, block: str) -> Path:
    """Write the block of an environment with images where `train` looks for it."""
    path = folder / f"conf/env/{name}.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(
        f"defaults: [base, _self_]\nname: {name}\ncommand: {json.dumps(stub_command(code))}\n"
        f"{block}"
    )
    return folder


@asynccontextmanager
async def started(host: Any) -> AsyncIterator[Any]:
    """Start a host, and close it at the end of the block."""
    try:
        await host.start()
        yield host
    finally:
        await host.close()


@asynccontextmanager
async def answering(
    answer: Callable[[web.Request], Awaitable[web.StreamResponse]], path: str = "/{path:.*}"
) -> AsyncIterator[str]:
    """Yield the URL of an HTTP server that answers requests of a path, or of all paths."""
    application = web.Application()
    application.router.add_route("*", path, answer)
    runner = web.AppRunner(application)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
