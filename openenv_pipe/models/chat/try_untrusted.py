"""The program of a process that tries what may never end, fill the memory, or end the process.

`limited_program.py` runs it, without this package. Its arguments say what stdin has, and the
limits: seconds of CPU time, and megabytes of memory.

tokenizer   a tokenizer.json; stdout gets JSON, the text of each token of its vocabulary by id
template    a chat template, which renders short conversations; errors that it raises are left to
            whoever renders it
"""

import json
import resource
import sys

OUTPUT_MB = 32
# Texts that take long if a normalizer's or a pre-tokenizer's regular expression is slow.
PROBES = (
    *("a" * 2000, " " * 2000, "0" * 2000, "\n" * 2000, "a " * 1000, "aA1_" * 500, "." * 2000),
    *("é" * 1000, "'s" * 1000, "\u4e2d" * 1000, "a" * 2000 + "!", " " * 2000 + "!"),
)
USER = {"role": "user", "content": "one"}
SYSTEM = {"role": "system", "content": "one"}
REPLY = {"role": "assistant", "content": "one"}
TOOL = {"name": "one", "description": "one", "parameters": {"type": "object", "properties": {}}}


def main() -> None:
    kind, cpu_s, memory_mb = sys.argv[1], *map(int, sys.argv[2:])
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_DATA, (memory_mb * 2**20, memory_mb * 2**20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    text = sys.stdin.buffer.read().decode()
    if kind == "tokenizer":
        decode_vocabulary(text)
    else:
        render(text, memory_mb)


def decode_vocabulary(text: str) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(text)
    for probe in PROBES:
        tokenizer.encode(probe)
    found, num_characters = {}, 0
    for number in tokenizer.get_vocab(with_added_tokens=True).values():
        found[number] = tokenizer.decode([number], skip_special_tokens=False)
        num_characters += len(found[number])
        if num_characters > OUTPUT_MB * 2**20:
            sys.exit(f"the texts of its tokens have more than {OUTPUT_MB} million characters")
    json.dump(found, sys.stdout)


def render(text: str, memory_mb: int) -> None:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(text: str) -> None:
        raise ValueError(text)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals.update(raise_exception=raise_exception, strftime_now=str)
    for messages, tools in (
        ([USER], None),
        ([SYSTEM, USER, REPLY, USER], None),
        ([USER], [{"type": "function", "function": TOOL}]),
    ):
        try:
            template = environment.from_string(text)
            template.render(messages=messages, tools=tools, add_generation_prompt=True)
        except MemoryError:
            sys.exit(f"it takes more than {memory_mb} MB of memory")
        except Exception:  # The run's own rendering reports it.
            continue


if __name__ == "__main__":
    main()
