"""An agent with a tool, in a process of its own: it looks words up over several turns.

Its conversations of the warm start are written by `dictionary_client.py write FILE`. Without
arguments it trains the model of `openenv-pipe serve --train` (docs/client.md has the commands), and
the environment variable OPENENV_PIPE_TOKEN has the token of both.
"""

import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from openenv_pipe.client import Client, TrainingEndedError

Message = dict[str, Any]
SYLLABLES = ("ka", "lo", "mi", "ru", "se", "to", "va", "ny")
ENGLISH = (
    *("apple", "bread", "bridge", "candle", "castle", "chair", "cloud", "coffee", "dream", "field"),
    *("fire", "flower", "forest", "garden", "glass", "gold", "hammer", "harbor", "honey", "horse"),
    *("house", "island", "kitchen", "ladder", "lamp", "lemon", "letter", "market", "mirror"),
    *("moon", "morning", "mountain", "music", "night", "ocean", "orange", "paper", "pencil"),
    *("pepper", "pillow", "planet", "pocket", "rain", "river", "road", "salt", "school", "shadow"),
    *("silver", "snow", "spoon", "star", "stone", "storm", "street", "summer", "sugar", "table"),
    *("tower", "valley", "water", "window"),
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look up an English word in the dictionary.",
            "parameters": {
                "type": "object",
                "properties": {"word": {"type": "string"}},
                "required": ["word"],
            },
        },
    }
]
MAX_CALLS = 3
# A language that no model knows: without the tool there is no right answer.
RNG = random.Random(0)
WORDS = {word: "".join(RNG.choices(SYLLABLES, k=3)) for word in ENGLISH}


def question(words: Sequence[str]) -> Message:
    return {"role": "user", "content": f"Translate: {' '.join(words)}"}


def play(chat: Callable[[list[Message]], Message], words: Sequence[str]) -> tuple[float, int]:
    """Let the model translate; return the share of right words, and how many it looked up."""
    messages, num_lookups = [question(words)], 0
    for _ in range(MAX_CALLS):
        reply = chat(messages)
        messages.append(reply)
        if not reply.get("tool_calls"):
            break
        for call in reply["tool_calls"]:
            num_lookups += 1
            word = json.loads(call["function"]["arguments"]).get("word")
            found = WORDS.get(str(word), "no such word")
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": found})
    answer = str(messages[-1]["content"]).split()
    expected = [WORDS[word] for word in words]
    return sum(a == b for a, b in zip(answer, expected, strict=False)) / len(words), num_lookups


def conversation(words: Sequence[str]) -> Message:
    """Return a conversation to imitate in the warm start: each word is looked up, then answered."""
    messages = [question(words)]
    for number, word in enumerate(words):
        arguments = json.dumps({"word": word})
        function = {"name": "look_up", "arguments": arguments}
        call = {"id": f"call_{number}", "type": "function", "function": function}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": WORDS[word]},
        ]
    answer = " ".join(WORDS[word] for word in words)
    return {"messages": [*messages, {"role": "assistant", "content": answer}], "tools": TOOLS}


def write(path: Path) -> None:
    """Write conversations for the warm start, which know half of the words."""
    rng = random.Random(1)
    lines = [json.dumps(conversation(rng.sample(ENGLISH[::2], 2))) for _ in range(100)]
    path.write_text("\n".join(lines) + "\n")


def train(url: str) -> None:
    num_played = 0
    with Client(url) as client:
        try:
            while True:
                with client.rollout() as rollout:  # Its seed is the same for its whole group.
                    rng = random.Random(rollout.task["observation"]["seed"])
                    reward, num_lookups = play(
                        lambda messages: rollout.chat(messages, tools=TOOLS), rng.sample(ENGLISH, 2)
                    )
                    rollout.finish(reward, {"lookups": num_lookups})
                num_played += 1
        except TrainingEndedError:
            print(f"played {num_played} episodes")


if __name__ == "__main__":
    if sys.argv[1:2] == ["write"]:
        write(Path(sys.argv[2]))
    else:
        train(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
