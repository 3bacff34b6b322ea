"""This package has the rules for GPUs: functions that find problems in a reading and in the kept state of a GPU."""
