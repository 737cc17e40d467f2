"""The program of a process that reads a tokenizer.json and decodes each token of its vocabulary.

`tokenizer_process.py` runs it, without this package: whoever wrote the file may have made it so
that it never ends, fills the memory, or ends the process. Its arguments are limits: seconds of CPU
time, and megabytes of memory. stdin has the file, stdout gets JSON: texts by id.
"""

import json
import resource
import sys

OUTPUT_MB = 32
# What a normalizer's or a pre-tokenizer's regular expression takes long for, if for anything.
PROBES = (
    *("a" * 2000, " " * 2000, "0" * 2000, "\n" * 2000, "a " * 1000, "aA1_" * 500, "." * 2000),
    *("é" * 1000, "'s" * 1000, "\u4e2d" * 1000, "a" * 2000 + "!", " " * 2000 + "!"),
)


def main() -> None:
    cpu_s, memory_mb = map(int, sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_DATA, (memory_mb * 2**20, memory_mb * 2**20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(sys.stdin.buffer.read().decode())
    for text in PROBES:
        tokenizer.encode(text)
    found, num_characters = {}, 0
    for number in tokenizer.get_vocab(with_added_tokens=True).values():
        found[number] = tokenizer.decode([number], skip_special_tokens=False)
        num_characters += len(found[number])
        if num_characters > OUTPUT_MB * 2**20:
            sys.exit(f"the texts of its tokens have more than {OUTPUT_MB} million characters")
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
