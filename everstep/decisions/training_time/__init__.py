"""The use of a job's time: its effective training time ratio, and the causes of lost time."""
