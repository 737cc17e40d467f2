"""Recorded episodes: their index, what is asked of it, and formats of export."""
