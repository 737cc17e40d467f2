"""Configuration: YAML has the values, `schema` the types and ranges, `compose` combines them."""
