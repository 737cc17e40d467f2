"""Attention over packed rows and over rows that share prefixes."""
