"""torch and peft: the policy, its steps, its checkpoints."""

import logging

# peft imports it where it is installed, and it then warns of a missing kernel for inference.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
