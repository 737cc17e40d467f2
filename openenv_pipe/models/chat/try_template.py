"""The program of a process that compiles a chat template and renders short conversations by it.

`rendering.py` runs it, without this package: whoever wrote the template may have made it
so that it fills the memory, or computes a number for longer than anybody waits, which nothing
interrupts. Its arguments are limits: seconds of CPU time, and megabytes of memory. stdin has the
template. Errors that the template raises are left to whoever renders it.
"""

import resource
import sys

USER = {"role": "user", "content": "one"}
SYSTEM = {"role": "system", "content": "one"}
REPLY = {"role": "assistant", "content": "one"}
TOOL = {"name": "one", "description": "one", "parameters": {"type": "object", "properties": {}}}


def main() -> None:
    cpu_s, memory_mb = map(int, sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_DATA, (memory_mb * 2**20, memory_mb * 2**20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(text: str) -> None:
        raise ValueError(text)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals.update(raise_exception=raise_exception, strftime_now=str)
    text = sys.stdin.buffer.read().decode()
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
