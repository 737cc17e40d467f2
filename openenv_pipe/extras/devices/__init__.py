"""`trainer.devices` above 1: a copy of the policy on each device, or a shard of it.

build           what a run learns with
learner_group   the learner, as seen from rank 0 and on each rank
sharded_weights trainer.parallel=fsdp: publication
fsdp, shard_files, sharded_load    a sharded policy, its files, its loading
ranks           how ranks communicate
workers, worker   the processes of the other ranks, as seen from rank 0 and from inside
"""

from openenv_pipe.registry import Extra

EXTRA = Extra(name="devices", devices="openenv_pipe.extras.devices.build:SeveralDevices")
