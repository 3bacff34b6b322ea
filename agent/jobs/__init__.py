"""This package runs the ranks of jobs on this machine, from launch to end."""
