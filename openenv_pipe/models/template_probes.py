"""Short conversations by which a chat template shows what it does."""

from openenv_pipe.types import Message, Tool


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(reply: str) -> Message:
    return {"role": "assistant", "content": reply}


OPENING: tuple[Message, ...] = ({"role": "user", "content": "question"},)
REPLY = "answer"
REPLIES = (REPLY, "<think>\nwhy\n</think>\n\nanswer")
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"word": "sky"}}\n</tool_call>'
RESULT: Message = {"role": "tool", "name": "look_up", "content": "the air above"}
TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "What a word means.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}
