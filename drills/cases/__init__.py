"""Cases: what is broken in a job, played in simulated time with the product's own workflows and decisions."""
