"""Print the best and the worst episode of a run's last step: read_episodes.py [RUN]."""

import sys

from openenv_pipe import open_run

run = open_run(sys.argv[1] if len(sys.argv) > 1 else "latest")
step = run.metrics[-1]["step"]
episodes = [episode for group in run.episodes(step) for episode in group.scored]
episodes.sort(key=lambda episode: episode.reward)

for episode in (episodes[-1], episodes[0]):
    print(f"{run.id} step {step}: reward {episode.reward:.3f}, {episode.status}")
    for turn in episode.turns:
        print(f"  reply {turn.reply!r}: reward {turn.reward}")
