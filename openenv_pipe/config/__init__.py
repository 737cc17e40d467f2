"""Configuration: values are in YAML, types and ranges in `schema`; `compose` combines both."""
