"""This package runs one step of a small reference model with the job's structure; machines compare its bits."""
