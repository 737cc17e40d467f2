"""Run folders: the proof of a run, readable by people, by CI, and after a kill at any instant."""
