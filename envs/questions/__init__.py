"""Questions for OpenEnv: a data set of questions and answers, one question an episode.

Nothing is imported here. Import what is needed directly: `questions.client.QuestionsEnv`,
`questions.models`, `questions.scoring`, `questions.server.app`.
"""
