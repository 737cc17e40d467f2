"""Email search for OpenEnv: answer a question about a mailbox, with tools to search and read it.

Nothing is imported here, so that `email_search.mailbox`, `email_search.grading` and
`email_search.policies` can be used without loading the `openenv` library, which takes seconds.
Import the rest directly: `email_search.models`, `email_search.server.app`.
"""
