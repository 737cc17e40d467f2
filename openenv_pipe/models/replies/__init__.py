"""What a reply says in the format of its family: thoughts, channels, text and tool calls."""
