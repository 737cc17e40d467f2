"""The commands `openenv-pipe env ...`, about one environment."""
