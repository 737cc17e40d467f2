"""The operating system's side: processes, locks, files, HTTP. Nothing here knows the domain."""
