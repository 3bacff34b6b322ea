"""Who is at fault: pure functions judge logs, hangs, slow steps, tests of machines and replays of a job."""
