"""Run folders: the record of a run, readable by people and programs, also after a kill."""
