"""Command-line overrides that code writes."""


def override_with_text(key: str, text: str) -> str:
    """Return `key='text'`, which Hydra reads as this text, whatever characters it has."""
    quoted = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"{key}='{quoted}'"
