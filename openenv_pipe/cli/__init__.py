"""The command line: commands, help, signals, exit codes, progress on a terminal."""
