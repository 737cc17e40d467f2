"""Sweeps: many runs from one command line, one after another or side by side.

`plan` says which jobs there are, `job` is one of them in whatever process a launcher calls it,
`keeper` keeps their servers, `watch` sees how they do, `search` proposes values, `folder` is what
stays, and `sweep` is the story.
"""
