"""The operating system's side: processes, locks, files, HTTP. No words of the domain."""
