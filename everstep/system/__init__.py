"""This computer as Linux shows it: processes, memory, private files, logs on disk. Nothing here knows what a job is."""
