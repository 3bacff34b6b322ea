"""Access to this computer through Linux: processes, memory, private files, logs. Nothing here knows what a job is."""
