"""The model's chat format: its untrusted template, its control tokens, and what ends a turn."""
