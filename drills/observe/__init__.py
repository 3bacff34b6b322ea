"""What a drill sees from outside: processes, copies, step records."""
