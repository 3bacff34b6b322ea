"""Which machines are taken out of a job: the rules, how far each may go, and what they would have done."""
