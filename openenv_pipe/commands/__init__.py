"""What each command does; `cli` has its options and its help."""
