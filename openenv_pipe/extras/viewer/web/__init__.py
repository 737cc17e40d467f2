"""The web interface of `openenv-pipe view`: run folders as pages, read and never written."""
