"""The update step of a policy, its optimizer and its checkpoints. Imports torch and peft."""

import logging

# peft imports bitsandbytes if it is installed, which warns of a missing inference kernel.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
