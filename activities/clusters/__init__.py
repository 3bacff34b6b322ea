"""Where machines come from: what lists those of a cluster, whoever keeps that list."""
