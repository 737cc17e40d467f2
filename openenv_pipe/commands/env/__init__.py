"""The commands `openenv-pipe env ...`, each about one environment."""
