"""An example of a plugin: a part for every door of openenv-pipe, and an experiment with them."""
