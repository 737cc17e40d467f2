"""Configuration: YAML holds the values, `schema` the types and ranges, `compose` joins them."""
