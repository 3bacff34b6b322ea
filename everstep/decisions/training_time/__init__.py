"""How a job's time was spent: its effective training time ratio, and what the lost time went into."""
