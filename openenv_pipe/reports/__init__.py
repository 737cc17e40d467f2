"""From run folders to pages, tables and pictures."""
