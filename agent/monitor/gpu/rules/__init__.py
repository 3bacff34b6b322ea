"""Rules for GPUs: functions from a reading and the kept state of a GPU to its problems."""
